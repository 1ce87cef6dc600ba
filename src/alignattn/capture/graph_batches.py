"""Which graph of a batch each node is in, told by what a model is called with.

Convolutions are given nodes and edges, and all graphs of a batch as one. The model knows: by its argument `batch` or
`ptr`, or those of the Data that it is given. Under any other name the vector is known by what it is,

    batch_0 = 0,   batch_i <= batch_(i+1),   batch_i = batch_j for every edge from j to i,

whole numbers, one a node. Labels in that order, of which no edge joins two, would pass for one; labels of a connected
graph never do. What is found twice and differently, or cannot be found, must be said (`alignment.graphs`).

Each convolution is asked anew: a model may run on two batches, each with a vector of its own. One that goes by its name
need not be in order; but a vector that an edge crosses is no batch of that convolution, whatever its name.
"""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from alignattn.errors import CaptureError

SEVERAL_KINDS = (
    "A batch of several graphs with several kinds of nodes: which of them a convolution runs on cannot be told, and "
    "nodes of different graphs are never matched. Give the model one such graph at a time, leave such convolutions out "
    "with layers=, or take cross=False."
)
DEEPEST = 3  # arguments that hold arguments: a list of dictionaries, say


def names_of_arguments(model: nn.Module) -> list[str]:
    """Of what it is called with, in order."""
    own = getattr(model, "signature", None)  # PyG's Sequential is told its arguments by name
    if isinstance(parameters := getattr(own, "param_dict", None), Mapping):
        return list(parameters)
    parameters = inspect.signature(model.forward).parameters
    return [name for name, one in parameters.items() if one.kind is not one.VAR_POSITIONAL]


@dataclass
class Told:
    """What the arguments of one forward pass say of graphs."""

    graphs: Tensor | None = None  # [nodes], where the user says so
    named: dict[str, Tensor] = field(default_factory=dict)  # that go by PyG's names, of one kind of nodes or several
    candidates: dict[str, Tensor] = field(default_factory=dict)  # that may be the same
    kinds: bool = False  # several graphs with several kinds of nodes
    known: Tensor | None = None  # what a convolution of this pass was found to run on

    def of(self, of_query: Tensor, of_key: Tensor, nodes: int) -> Tensor | None:
        """The batch of a convolution with these edges; None: all nodes are in one graph.

        A vector of another length, where there is none of this one's: it cannot be told.
        """
        if self.graphs is not None:
            return self.graphs
        named = {name: one.to(of_key.device) for name, one in self.named.items() if len(one) == nodes}
        found = _only({name: one for name, one in named.items() if stays_within(one, of_query, of_key)})
        if found is None:
            others = {name: one.to(of_key.device) for name, one in self.candidates.items() if len(one) == nodes}
            found = _only({name: one for name, one in others.items() if is_batch(one, of_query, of_key)})
        if found is not None:
            self.known = found
            return found
        before = next(iter(self.named.values()), self.known)
        return None if named or before is None or len(before) == nodes else before

    def tells_two_kinds_apart(self, of_query: Tensor, of_key: Tensor, queries: int, keys: int) -> bool:
        """Whether there are vectors for the nodes of two kinds by which their edges stay within graphs."""
        if self.kinds:
            return True
        vectors = [vector.to(of_key.device) for vector in self.candidates.values()]
        pairs = [(q, k) for q in vectors if len(q) == queries for k in vectors if len(k) == keys]
        return any(bool((q[of_query] == k[of_key]).all() & in_order(q) & in_order(k)) for q, k in pairs)


def _only(fits: dict[str, Tensor]) -> Tensor | None:
    if not fits:
        return None
    (name, graphs), *others = fits.items()
    other = next((other for other, vector in others if not torch.equal(vector, graphs)), None)
    if other is not None:
        raise CaptureError(
            f"Both {name} and {other} may tell which graph of a batch a node is in, and they differ. Nodes of "
            "different graphs are never matched: call the model within alignment.graphs(vector), of one of them."
        )
    return graphs


def graphs_of(names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Told:
    """The `batch` or `ptr` of the model's arguments, or of the Data among them, and what else may be one."""
    positional = {names[place] if place < len(names) else f"argument {place}": one for place, one in enumerate(args)}
    given = positional | kwargs
    candidates = {name: one for name, one in _tensors(given, DEEPEST) if _may_be_batch(one)}
    found = next(_batches(given), None)
    if isinstance(found, Mapping):  # of nodes of several kinds
        named = {f"batch_dict[{kind!r}]": one for kind, one in found.items() if _is_vector(one)}
        several = any(int(one.max()) > 0 for one in named.values() if one.numel())
        return Told(named=named if several else {}, candidates=candidates if several else {}, kinds=several)
    return Told(named={} if found is None else {"batch": found}, candidates=candidates)


def in_order(vector: Tensor) -> Tensor:
    """Whether it counts graphs from zero on, and comes further than that."""
    return (vector[0] == 0) & (vector.diff() >= 0).all() & (vector[-1] > 0)


def is_batch(vector: Tensor, of_query: Tensor, of_key: Tensor) -> bool:
    """Whether it counts several graphs, and no edge leaves one."""
    return bool(in_order(vector)) and stays_within(vector, of_query, of_key)


def stays_within(vector: Tensor, of_query: Tensor, of_key: Tensor) -> bool:
    """Whether no edge joins nodes that it tells apart."""
    return bool((vector[of_query] == vector[of_key]).all())


def _is_vector(one: Any) -> TypeGuard[Tensor]:
    """Of whole numbers."""
    if not isinstance(one, Tensor) or one.layout != torch.strided or one.ndim != 1:
        return False
    return not (one.is_floating_point() or one.is_complex() or one.dtype == torch.bool)


def _may_be_batch(vector: Tensor) -> bool:
    return type(vector) is Tensor and _is_vector(vector) and len(vector) > 1


def _batches(given: Mapping[str, Any]) -> Iterator[Tensor | Mapping[str, Any]]:
    """Those that go by the names PyG has for them."""
    yield from _named(given)
    for value in given.values():
        if isinstance(value, Mapping):
            yield from _named(value)
        elif _is_pyg(value):
            several = getattr(value, "batch_dict", None) if hasattr(value, "node_types") else None
            yield from _named({"batch_dict": several} if several else _attributes(value))


def _named(given: Mapping[str, Any]) -> Iterator[Tensor | Mapping[str, Any]]:
    batch, several, bounds = (given.get(name) for name in ("batch", "batch_dict", "ptr"))
    if _is_vector(batch):
        yield batch
    if isinstance(several, Mapping):
        yield several
    if isinstance(bounds, Tensor) and bounds.ndim == 1 and len(bounds) > 1:  # where each graph begins, and the end
        yield torch.arange(len(bounds) - 1, device=bounds.device).repeat_interleave(bounds.diff())


def _tensors(given: Mapping[Any, Any], depth: int) -> Iterator[tuple[str, Tensor]]:
    """All that is given, by name, in whatever it is wrapped."""
    for name, value in given.items():
        if isinstance(value, Tensor):
            yield str(name), value
        elif depth and (inside := _inside(value)):
            yield from ((f"{name}.{inner}", tensor) for inner, tensor in _tensors(inside, depth - 1))


def _inside(value: Any) -> Mapping[Any, Any]:
    if isinstance(value, Mapping):
        return value
    if _is_pyg(value):
        return {} if hasattr(value, "node_types") else _attributes(value)
    if hasattr(value, "_asdict"):
        return dict(value._asdict())
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    return {} if isinstance(value, nn.Module | type) else dict(getattr(value, "__dict__", {}))


def _is_pyg(value: Any) -> bool:
    return any(kind.__module__.startswith("torch_geometric.data") for kind in type(value).__mro__)


def _attributes(data: Any) -> Mapping[str, Any]:
    """Of a Data, what is stored in it, and a `batch` that it may compute."""
    return (dict(data.to_dict()) if hasattr(data, "to_dict") else {}) | {"batch": getattr(data, "batch", None)}
