"""One call of a graph convolution of PyG: which of the three it is, and its queries, keys and edges.

Projections put queries and keys out, or, in GATConv, a product with one of its vectors, which a function mode sees.
What is handed back are views of what was taken.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode

from alignattn.errors import UnsupportedModelError

# Where each is defined, and which of its children make queries and which keys.
CONVOLUTIONS = {
    "GATConv": ("gat_conv", {"lin": "both", "lin_src": "key", "lin_dst": "query"}),
    "GATv2Conv": ("gatv2_conv", {"lin_l": "key", "lin_r": "query"}),
    "TransformerConv": ("transformer_conv", {"lin_query": "query", "lin_key": "key"}),
}


class Call:
    """One call of one convolution: its queries and keys so far."""

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module
        self.taken: dict[str, Tensor] = {}  # [1, h, nodes, d]

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def take(self, tokens: Tensor, side: str) -> Tensor:
        """What was taken, [nodes, h, d] as it came. A projection of both sides makes keys, and then other queries."""
        heads = tokens.transpose(0, 1)[None]  # (1, h, nodes, d)
        if side != "query":
            self.taken.setdefault("key", heads)
        if side != "key":
            self.taken["query"] = heads
        return heads.squeeze(0).transpose(0, 1)  # views: gradients are added up as they were

    def pair(self, name: str) -> tuple[Tensor, Tensor]:
        """Queries and keys."""
        if len(self.taken) < 2:
            raise UnsupportedModelError(
                f"{name} was given no nodes that attend, (x, None), and so has no queries. Give it both kinds of "
                "nodes, or leave it out with layers=."
            )
        return self.taken["query"], self.taken["key"]

    def edges(self, edge_index: Any, queries: int, keys: int) -> tuple[Tensor, Tensor]:
        """Places of queries and of keys, one an edge."""
        key_at = 0 if self.module.flow == "source_to_target" else 1
        if type(edge_index) is Tensor and edge_index.layout == torch.strided:
            return edge_index[1 - key_at], edge_index[key_at]
        device = self.taken["key"].device
        counts = {key_at: keys, 1 - key_at: queries}
        places = [self.module._lift(torch.arange(counts[at], device=device), edge_index, at) for at in (0, 1)]
        return places[1 - key_at], places[key_at]


class Products(Call, TorchFunctionMode):
    """A call of GATConv, which multiplies its nodes by the vectors of keys and of queries."""

    def __init__(self, module: nn.Module) -> None:
        TorchFunctionMode.__init__(self)
        Call.__init__(self, module)

    def __enter__(self) -> Any:
        return TorchFunctionMode.__enter__(self)

    def __exit__(self, *of: Any) -> None:  # noqa: PYI036
        TorchFunctionMode.__exit__(self, *of)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if len(args) == 2 and getattr(func, "__name__", "") in ("mul", "__mul__"):
            side = self._side(*args)
            if side is not None:
                return self.take(found, side)
        return found

    def _side(self, nodes: Any, vector: Any) -> str | None:
        """What such a product makes."""
        module = self.module
        if not (is_parametrized(module, "att_src") or is_parametrized(module, "att_dst")):
            of_keys, of_queries = module.att_src, module.att_dst
            if of_keys is not of_queries:
                return "key" if vector is of_keys else "query" if vector is of_queries else None
        # A vector that is made anew each time, or one for both, is known by its shape: that of keys comes first.
        heads = (module.heads, module.out_channels)
        if not (isinstance(vector, Tensor) and vector.shape == (1, *heads) and nodes.shape[1:] == heads):
            return None
        return next((side for side in ("key", "query") if side not in self.taken), None)


def convolution(module: nn.Module) -> str | None:
    """Which of the three it is, or is derived from. PyG is not imported: a model that holds one has done so."""
    for name, (file, _) in CONVOLUTIONS.items():
        kind = getattr(sys.modules.get(f"torch_geometric.nn.conv.{file}"), name, None)
        if kind is not None and isinstance(module, kind):
            return name
    return None


def makers(module: nn.Module) -> dict[nn.Module, str]:
    """The children that make queries and keys, and which of them; one that goes by two names makes both."""
    found: dict[nn.Module, str] = {}
    for name, side in CONVOLUTIONS[str(convolution(module))][1].items():
        if isinstance(linear := getattr(module, name, None), nn.Module):
            found[linear] = "both" if linear in found else side
    return found
