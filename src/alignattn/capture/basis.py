"""The basis of a head's queries and keys, to which their product is blind.

    (q A) · (k A⁻ᵀ) = q · k        for any matrix A that can be inverted

So queries and keys can be written in any basis, as long as they go from their projections into the product as they
are: a rotation or norm in between, or a query that meets positions too, would notice. Where projections are shared
with others, those would.
"""

from collections import Counter
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from alignattn.capture.keybias import like
from alignattn.capture.projection import NORM, side_of

EXACT = (torch.float32, torch.float64)  # in fewer digits a change of basis would be felt as rounding


@dataclass(frozen=True)
class Rows:
    """Those rows of a projection that make queries, or keys."""

    owner: nn.Module
    weight: str
    bias: str | None
    start: int
    size: int

    def parameters(self) -> list[nn.Parameter]:
        """Weight and bias, looked up when they are needed: sharding a model puts others in their place."""
        return [getattr(self.owner, name) for name in (self.weight, self.bias) if name is not None]

    @torch.no_grad()
    def turn(self, by: Float[Tensor, "h d d"]) -> None:
        """Let every head's tokens x come out as x · `by`."""
        heads, width = by.shape[:2]
        for parameter in self.parameters():
            whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            mine = slice(self.start, self.start + self.size)
            rows = whole[mine].to(by).view(heads, width, -1)  # (h, d, inputs), or (h, d, 1) of a bias
            turned = whole.clone()
            turned[mine] = (by.mT @ rows).view_as(whole[mine]).to(whole)
            parameter.copy_(like(turned, parameter))


@dataclass(frozen=True)
class Basis:
    """Where an attention module keeps what makes its queries and keys."""

    query: Rows
    key: Rows
    projections: tuple[nn.Module, nn.Module] | None  # whose outputs they must be; None: they are by construction

    def parameters(self) -> list[nn.Parameter]:
        """All that a change of basis writes to."""
        return self.query.parameters() + self.key.parameters()


def find_basis(module: nn.Module) -> Basis | None:
    """The projections of an attention module, where each has its own and they are known by their names."""
    if isinstance(module, nn.MultiheadAttention):
        return _of_multihead(module)
    children = list(module.named_children())
    sides = [[child for name, child in children if side_of(name) == side] for side in ("query", "key")]
    if any(len(side) != 1 or type(side[0]) is not nn.Linear for side in sides):
        return None
    if any("weight" not in linear._parameters for (linear,) in sides):  # made anew in each call, as by pruning
        return None
    if any(NORM.match(name) for name, _ in children):
        return None
    query, key = (_of_linear(linear) for (linear,) in sides if isinstance(linear, nn.Linear))
    return Basis(query, key, (sides[0][0], sides[1][0]))


def shared_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Parameters that more than one module holds, or that are of a module that more than one holds.

    A module that one other holds by several names counts once.
    """
    held = Counter(p for module in model.modules() for p in module.parameters(recurse=False))
    parents = Counter(child for module in model.modules() for child in module.children())
    of_shared = {p for child, count in parents.items() if count > 1 for p in child.parameters(recurse=False)}
    return of_shared | {parameter for parameter, count in held.items() if count > 1}


def _of_linear(linear: nn.Linear) -> Rows:
    return Rows(linear, "weight", None if linear.bias is None else "bias", 0, linear.out_features)


def _of_multihead(module: nn.MultiheadAttention) -> Basis | None:
    if module.bias_k is not None or module.add_zero_attn:
        return None  # keys that are added behind the projection would be left where they were
    if module.in_proj_weight is None:  # a weight of its own for each, and one bias for all
        return None
    width = module.embed_dim
    bias = None if module.in_proj_bias is None else "in_proj_bias"
    query, key = (Rows(module, "in_proj_weight", bias, start, width) for start in (0, width))
    return Basis(query, key, None)
