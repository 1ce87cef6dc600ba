"""Which graph of a batch each node is in, told by what a model is called with.

Convolutions are given nodes and edges, and all graphs of a batch as one. The model knows: by its argument `batch`, or
by that of the Data that it is given.
"""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from alignattn.errors import UnsupportedModelError


def names_of_arguments(model: nn.Module) -> list[str]:
    """Of what it is called with, in order."""
    own = getattr(model, "signature", None)  # PyG's Sequential is told its arguments by name
    if isinstance(parameters := getattr(own, "param_dict", None), Mapping):
        return list(parameters)
    return list(inspect.signature(model.forward).parameters)


def graphs_of(given: dict[str, Any], args: tuple[Any, ...]) -> Tensor | None:
    """The `batch` of the model's arguments, or of the Data among them."""
    found = next(_batches({**given, **dict(enumerate(args))}), None)
    if isinstance(found, Mapping):  # of nodes of several kinds
        if any(int(batch.max()) > 0 for batch in found.values() if isinstance(batch, Tensor) and batch.numel()):
            raise UnsupportedModelError(
                "A batch of several graphs with several kinds of nodes: which of them a convolution runs on cannot be "
                "told, and nodes of different graphs are never matched. Give the model one such graph at a time."
            )
        return None
    return found if isinstance(found, Tensor) else None


def _batches(given: Mapping[Any, Any]) -> Iterator[Tensor | Mapping[str, Any]]:
    if isinstance(given.get("batch"), Tensor):
        yield given["batch"]
    if isinstance(given.get("batch_dict"), Mapping):
        yield given["batch_dict"]
    for value in given.values():
        if isinstance(value, Mapping) and isinstance(value.get("batch"), Tensor):
            yield value["batch"]
        elif any(kind.__module__.startswith("torch_geometric.data") for kind in type(value).__mro__):
            several = getattr(value, "batch_dict", None) if hasattr(value, "node_types") else None
            batch = several or getattr(value, "batch", None)
            if isinstance(batch, Tensor | Mapping):
                yield batch
