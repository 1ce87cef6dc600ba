"""Conditional transport along the edges of a graph: each query to the keys it attends to, each key to its queries.

    CT = 1/2 E_q[ sum_{k in N(q)} pi(k|q) c(q,k) ] + 1/2 E_k[ sum_{q: k in N(q)} pi(q|k) c(q,k) ]
    pi(k|q) ∝ exp(navigator(k)·navigator(q)) over the neighbours of q,   c = 1 - cos(critic(q), critic(k))

Queries without a neighbour, and keys that nobody attends to, have no conditional distribution and are left out of the
expectations. Edges that join the same two nodes count as often as they are there, as they do in attention.

With S the scores and C the costs of edges, A the plan of their queries and B that of their keys, each times what its
node counts, r the mean cost of a query by its plan and s that of a key, the loss is Σ (A + B) C, and its gradients are

    of C:  A + B          of S:  A (C - r) + B (C - s)

Both come out of one pass over edges, a few thousand at a time: what is held of an edge are some numbers a head, and
never its features. Memory is linear in the number of edges.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from alignattn.errors import ShapeError, checked
from alignattn.matching.tokens import chunks_of, direction, full_precision, upcast

LARGEST_FEATURE = 1e6  # of the navigator, as in conditional.py
LEAST_COST = 1e-3  # of a distance: its gradient stays finite where q and k meet


def check_edges(
    critic_query: Tensor, critic_key: Tensor, navigator_query: Tensor, navigator_key: Tensor, edges: Any, **_: object
) -> None:
    """Two rows of places, equally long, among the queries and the keys of all samples."""
    if len(edges) != 2 or any(side.ndim != 1 or side.is_floating_point() for side in edges):
        raise ShapeError("edges must be two rows of whole numbers: places of queries, and of keys they attend to.")
    if len(edges[0]) != len(edges[1]):
        raise ShapeError(f"edges must be pairs, got {len(edges[0])} queries and {len(edges[1])} keys.")
    if critic_query.shape[:3] != navigator_query.shape[:3] or critic_key.shape[:3] != navigator_key.shape[:3]:
        raise ShapeError("critic and navigator features must be of the same tokens.")


@checked(check_edges)
@full_precision
def neighbourhood_transport(
    critic_query: Float[Tensor, "b h n e"],
    critic_key: Float[Tensor, "b h m e"],
    navigator_query: Float[Tensor, "b h n f"],
    navigator_key: Float[Tensor, "b h m f"],
    edges: tuple[Int[Tensor, " edges"], Int[Tensor, " edges"]],
    *,
    cost: str = "cosine",
) -> Float[Tensor, "b h"]:
    """Bidirectional conditional transport cost along edges, of each problem.

    `edges` are places of queries among all b·n, and of keys among all b·m, of one sample each. `cost` is "cosine", or
    "euclidean": the distance of unit critic features. A sample without edges costs nothing.
    """
    units = [_nodes(direction(upcast(side))) for side in (critic_query, critic_key)]
    clamped = [
        _nodes(upcast(side).clamp(-LARGEST_FEATURE, LARGEST_FEATURE)) for side in (navigator_query, navigator_key)
    ]
    losses: Tensor = _AlongEdges.apply(
        *units, *clamped, edges[0].long(), edges[1].long(), len(critic_query), cost == "euclidean"
    )
    return losses


def _nodes(features: Float[Tensor, "b h n e"]) -> Float[Tensor, "bn h e"]:
    """The nodes of all samples, one after another."""
    return features.transpose(1, 2).flatten(0, 1).contiguous()


class _AlongEdges(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        unit_query: Tensor,
        unit_key: Tensor,
        navigator_query: Tensor,
        navigator_key: Tensor,
        of_query: Tensor,
        of_key: Tensor,
        samples: int,
        euclidean: bool,
    ) -> Tensor:
        scores = _products(navigator_query, navigator_key, of_query, of_key)  # (edges, h)
        costs = 1 - _products(unit_query, unit_key, of_query, of_key)
        slope = None  # of the cost, times minus one, by the similarity; None: one
        if euclidean:
            costs = (2 * costs).clamp_min(LEAST_COST**2).sqrt()
            slope = torch.where(costs > LEAST_COST, 1 / costs, 0.0)
        losses = scores.new_zeros(samples, scores.shape[1])
        of_costs, of_scores = torch.zeros_like(costs), torch.zeros_like(scores)
        for places, nodes in ((of_query, len(unit_query)), (of_key, len(unit_key))):
            plan = _softmax(scores, places, nodes)
            mean = _summed(plan * costs, places, nodes)  # (nodes, h): by the plan of each
            counts = _counts(scores, places, nodes, samples)  # (nodes,), zero for those that are left out
            losses += (mean * counts[:, None]).unflatten(0, (samples, -1)).sum(1)
            plan *= counts.index_select(0, places)[:, None]
            of_costs += plan
            of_scores += plan * (costs - mean.index_select(0, places))
        of_similarities = of_costs.neg_() if slope is None else of_costs.mul_(slope).neg_()
        ctx.save_for_backward(
            unit_query, unit_key, navigator_query, navigator_key, of_query, of_key, of_similarities, of_scores
        )
        ctx.nodes = len(unit_query) // samples
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        *features, of_query, of_key, of_similarities, of_scores = ctx.saved_tensors
        each = outer[0].index_select(0, of_query // ctx.nodes)  # (edges, h): what the sample of an edge counts
        of_units = _carried(features[0], features[1], of_query, of_key, of_similarities * each)
        of_navigators = _carried(features[2], features[3], of_query, of_key, of_scores * each)
        return *of_units, *of_navigators, None, None, None, None


def _pieces(features: Tensor, edges: int) -> list[slice]:
    """Edges whose features are held at once."""
    step = chunks_of(edges, features[0].numel(), features.device) if edges else 1
    return [slice(start, start + step) for start in range(0, edges, step)]


def _products(
    query: Float[Tensor, "bn h e"], key: Float[Tensor, "bm h e"], of_query: Tensor, of_key: Tensor
) -> Float[Tensor, "edges h"]:
    """Inner products of the two ends of each edge."""
    found = query.new_empty(len(of_query), query.shape[1])
    for piece in _pieces(query, len(of_query)):
        found[piece] = (query.index_select(0, of_query[piece]) * key.index_select(0, of_key[piece])).sum(-1)
    return found


def _carried(
    query: Float[Tensor, "bn h e"],
    key: Float[Tensor, "bm h e"],
    of_query: Tensor,
    of_key: Tensor,
    given: Float[Tensor, "edges h"],
) -> tuple[Float[Tensor, "bn h e"], Float[Tensor, "bm h e"]]:
    """The gradients of both ends, from those of their products."""
    gradients = torch.zeros_like(query), torch.zeros_like(key)
    rows = [gradient.flatten(1) for gradient in gradients]  # on a CPU matrices are added to ten times as fast
    for piece in _pieces(query, len(of_query)):
        factor = given[piece, :, None]
        rows[0].index_add_(0, of_query[piece], (factor * key.index_select(0, of_key[piece])).flatten(1))
        rows[1].index_add_(0, of_key[piece], (factor * query.index_select(0, of_query[piece])).flatten(1))
    return gradients


def _summed(values: Float[Tensor, "edges h"], places: Tensor, nodes: int) -> Float[Tensor, "nodes h"]:
    return values.new_zeros(nodes, values.shape[1]).index_add_(0, places, values)


def _softmax(scores: Float[Tensor, "edges h"], places: Tensor, nodes: int) -> Float[Tensor, "edges h"]:
    """Over the edges of each node."""
    highest = scores.new_zeros(nodes, scores.shape[1])
    highest.scatter_reduce_(0, places[:, None].expand_as(scores), scores, "amax", include_self=False)
    raised = (scores - highest.index_select(0, places)).exp()
    total = _summed(raised, places, nodes)
    return raised / total.index_select(0, places)


def _counts(scores: Tensor, places: Tensor, nodes: int, samples: int) -> Float[Tensor, " nodes"]:
    """What each node counts: half of one over the nodes of its sample that have edges; zero if it has none."""
    has: Tensor = scores.new_zeros(nodes).index_fill_(0, places, 1.0).unflatten(0, (samples, -1))
    return (has / (2 * has.sum(1, keepdim=True).clamp_min(1.0))).flatten()
