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


@dataclass(frozen=True, kw_only=True)
class AlongEdges(Attending):
    """Of a graph, in which a query attends along its edges and to nothing else."""

    edges: tuple[Tensor, Tensor]  # places of queries and of keys, [e] each
    weights: Tensor  # [e, h], after the softmax

    def logits_of(
        self, query: Float[Tensor, "b h n d"], key: Float[Tensor, "b h m d"], rows: slice
    ) -> Float[Tensor, "b h r m"]:
        """Logarithms of weights: of such softmax makes the weights again. Edges between the same two nodes add up."""
        first, behind, _ = rows.indices(query.shape[2])
        of_query, of_key = self.edges
        within = (of_query >= first) & (of_query < behind)
        weights = self.weights.new_zeros(behind - first, key.shape[2], self.weights.shape[1], dtype=torch.float32)
        weights.index_put_((of_query[within] - first, of_key[within]), self.weights[within].float(), accumulate=True)
        return weights.permute(2, 0, 1).log()[None]
