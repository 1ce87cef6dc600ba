"""A small vision transformer: patches as tokens, torch's own encoder."""

import torch
from jaxtyping import Float
from torch import Tensor, nn


class VisionTransformer(nn.Module):
    """Grey images [b, side, side] to logits; the patches, and no class token, are the tokens."""

    def __init__(
        self, *, side: int = 8, patch: int = 2, width: int = 32, heads: int = 4, layers: int = 3, classes: int = 10
    ) -> None:
        super().__init__()
        self.patch = patch
        self.embed = nn.Linear(patch * patch, width)
        # Places weigh as much as patches: with the usual 0.02 it takes the model most of its training to tell them.
        self.position = nn.Parameter(torch.randn(1, (side // patch) ** 2, width) * 0.5)
        block = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(block, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.classify = nn.Linear(width, classes)

    def forward(self, images: Float[Tensor, "b side side"]) -> Float[Tensor, "b classes"]:
        rows = images.unfold(1, self.patch, self.patch).unfold(2, self.patch, self.patch)  # (b, r, c, p, p)
        tokens = self.embed(rows.flatten(3).flatten(1, 2)) + self.position  # (b, n, width)
        logits: Tensor = self.classify(self.encoder(tokens).mean(1))
        return logits
