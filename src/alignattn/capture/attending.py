"""How one attention call weighs its keys: softmax(query keyᵀ · scale + bias), a few queries at a time.

With a cap, as Gemma has it, the products are cap · tanh(product / cap). Where a model writes its attention out, its own
logits are taken, whatever went into them.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Attending:
    """What a call does to queries and keys before the softmax. A sink beside the keys is left out."""

    scale: float = 1.0
    bias: Tensor | None = None  # broadcasts to [b, h, n, m]; masked pairs are far below zero
    cap: float | None = None
    logits: Tensor | None = None  # [b, h, n, m] of the model itself: then nothing else counts

    def logits_of(
        self, query: Float[Tensor, "b h n d"], key: Float[Tensor, "b h m d"], rows: slice
    ) -> Float[Tensor, "b h r m"]:
        """What the softmax of these queries is given, in single precision."""
        if self.logits is not None:
            return self.logits[:, :, rows].float()
        products = query[:, :, rows].float() @ key.float().mT * self.scale
        if self.cap is not None:
            products = self.cap * torch.tanh(products / self.cap)
        if self.bias is None:
            return products
        bias = self.bias if self.bias.ndim < 2 or self.bias.shape[-2] == 1 else self.bias[..., rows, :]
        return products + bias.float()
