"""What pictures of graph attention are drawn from: two GATs of one seed, trained alike but for alignment.

    change of node i in a head = 1/2 sum_j |alpha_ij - alpha'_ij|,  the share of its attention that goes elsewhere

The embeddings are those of some test nodes. The neighbourhood is that of the test node, in the layer and head, that
alignment has changed most. The most is not the usual, so the mean over test nodes and heads is told beside it; and so
is how far attention is from even shares, alpha' = 1 / neighbours.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from alignattn import plots
from alignattn.errors import DataError
from alignattn.experiments.tasks.graph import NodeClassification
from alignattn.experiments.training import Trained
from alignattn.models.gat import GATs, GraphInput

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NODES = 250  # whose embeddings are shown
NEIGHBOURS = range(4, 11)  # of the node that is shown, itself included: fewer are no choice, more no picture
DIGITS = 3


@torch.no_grad()
def tell(trained: Mapping[str, Trained]) -> dict[str, Any]:
    """Of two kinds of attention by title, soft attention first: plain numbers that can be stored."""
    task = next(iter(trained.values())).task
    assert isinstance(task, NodeClassification)
    models = {title: cast("GATs", one.model) for title, one in trained.items()}
    chance = torch.Generator().manual_seed(0)
    tested = task.nodes["test"].cpu()
    nodes = tested[torch.randperm(len(tested), generator=chance)[:NODES]]
    attention = {title: _all_heads(model, task.input) for title, model in models.items()}
    row, column = task.input.edges.row.cpu(), task.input.edges.column.cpu()
    degree = row.bincount(minlength=task.input.nodes)
    first, second = (torch.stack(list(heads.values())) for heads in attention.values())  # (heads, e)
    change = _moved(first, second, row, len(degree))
    node, place = _most_changed(change, degree, tested)
    layer, head = list(attention[next(iter(models))])[place]
    own = (row == node).nonzero()[:, 0]
    own = own[column[own].argsort()]
    labels = task.graph.labels
    even = (1 / degree)[row]
    return {
        "classes": labels[nodes].tolist(),
        "embeddings": {
            title: _rounded(model.embeddings(task.input)[0].cpu()[nodes], DIGITS - 1) for title, model in models.items()
        },
        "node": node,
        "layer": layer,
        "head": head,
        "neighbours": column[own].tolist(),
        "classes_around": labels[column[own]].tolist(),
        "attention": {title: _rounded(heads[layer, head][own], DIGITS) for title, heads in attention.items()},
        # Percent of a node's attention: of what is shown, and the mean over test nodes and heads.
        "changed": {
            "most": round(100 * float(change[place, node]), 2),
            "mean": round(100 * float(change[:, tested].mean()), 2),
        },
        "uneven": {
            title: round(100 * float(_moved(heads, even, row, len(degree))[:, tested].mean()), 2)
            for title, heads in zip(attention, (first, second), strict=True)
        },
    }


def draw(told: Mapping[str, Any]) -> "dict[str, list[Axes]]":
    """Both pictures, by name, of what `tell` told."""
    around = dict(zip(told["neighbours"], told["classes_around"], strict=True))
    where = f"{told['layer']} layer, head {told['head']}"
    attention = {f"{title}: {where}": weights for title, weights in told["attention"].items()}
    return {
        "embeddings": plots.embeddings(told["embeddings"], classes=told["classes"]),
        "neighbourhood": plots.neighbourhood(
            attention, node=told["node"], neighbours=told["neighbours"], classes=around
        ),
    }


def _all_heads(model: nn.Module, graph: GraphInput) -> dict[tuple[str, int], Tensor]:
    """The coefficients [e] of each head, by layer and number."""
    assert isinstance(model, GATs) and not model.training
    layers = model.attention(graph)
    return {(name, head): one for name, (heads,) in layers.items() for head, one in enumerate(heads.cpu())}


def _moved(weights: Tensor, others: Tensor, row: Tensor, nodes: int) -> Tensor:
    """The share of each node's attention that has gone elsewhere, [heads, nodes]."""
    return torch.zeros(len(weights), nodes).index_add_(1, row, (weights - others).abs() / 2)


def _most_changed(change: Tensor, degree: Tensor, tested: Tensor) -> tuple[int, int]:
    """The test node with a handful of neighbours, and the head, whose attention differs most."""
    handful = torch.tensor([int(count) in NEIGHBOURS for count in degree[tested]])
    if not handful.any():
        raise DataError(f"No test node has {NEIGHBOURS[0]} to {NEIGHBOURS[-1]} neighbours.")
    candidates = tested[handful]
    head, place = divmod(int(change[:, candidates].argmax()), len(candidates))
    return int(candidates[place]), head


def _rounded(values: Tensor, digits: int) -> Any:
    values = values.double()
    return [_rounded(row, digits) for row in values] if values.ndim > 1 else [round(v, digits) for v in values.tolist()]
