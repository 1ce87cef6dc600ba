"""What one node of a graph attends to, as a convolution of PyG computes it: edges that come in, with their weights."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from alignattn.capture.attending import AlongEdges
from alignattn.capture.feed import feed
from alignattn.diagnosis.attention import call_of
from alignattn.errors import ConfigError


@dataclass(frozen=True)
class Neighbourhood:
    """The nodes that one node attends to, itself among them where the layer adds self-loops."""

    nodes: list[int]  # in rising order; of the other kind where a layer runs between two kinds of nodes
    weights: Float[Tensor, "h m"]  # of each head; they add up to one


@torch.no_grad()
def neighbourhood_of(
    model: nn.Module,
    batch: Any,
    layer: int | str,
    node: int,
    *,
    repeat: int = 0,
    call: Callable[[nn.Module, Any], object] = feed,
) -> Neighbourhood:
    """Whom `node` attends to in one convolution of PyG, in eval mode, and by which weights.

    They are those the layer gathers its neighbours by, with self-loops and edge features as it takes them; edges
    between the same two nodes are added up. `layer`, `repeat` and `call` are those of `attention_of`, which shows all
    pairs of nodes at once: on a large graph there are too many. A node without edges has no neighbours.
    """
    record = call_of(model, batch, layer, repeat=repeat, call=call, who="neighbourhood_of()")
    attending = record.attending
    if not isinstance(attending, AlongEdges):
        raise ConfigError(
            f"{record.name} has no neighbourhoods: it attends to every token. attention_of() tells by which weights."
        )
    nodes = record.query.shape[2]
    if not -nodes <= node < nodes:
        raise ConfigError(f"node={node}: {record.name} ran on {nodes} nodes that attend, 0 to {nodes - 1}.")
    of_query, of_key = attending.edges
    own = of_query == node % nodes
    neighbours, place = of_key[own].unique(return_inverse=True)
    weights = attending.weights.new_zeros(len(neighbours), attending.weights.shape[1])
    return Neighbourhood(neighbours.tolist(), weights.index_add_(0, place, attending.weights[own]).mT.contiguous())
