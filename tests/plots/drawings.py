"""A small picture of each kind, drawn of titles alone, and titles that are no easy ones."""

import numpy as np
from matplotlib.collections import PathCollection, QuadMesh

from alignattn import plots

BINS = {
    "count": [0, 10, 0, 30],
    "confidence": [float("nan"), 0.4, float("nan"), 0.9],
    "accuracy": [float("nan"), 0.5, float("nan"), 0.7],
    "edges": [0, 0.25, 0.5, 0.75, 1],
}
STRANGE = [
    "<script>alert(1)</script> & --> ]]>",
    "$x$ \\frac{ 100 %",
    "",
    " ",
    "你好 🎉👩‍👩‍👧 \u202eabc",
    "a\nb\tc\0d",
    "_x",
    "m" * 300,
]
TOKENS = ["[CLS]", "a", "$funny$", "<b>film</b>", "[SEP]"]


def gaussian(n: int, d: int = 8, *, shift: float = 0.0, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, d)) + shift


def weights(n: int, m: int, seed: int = 0) -> np.ndarray:
    """Rows of positive numbers that sum to one."""
    positive = np.exp(gaussian(n, m, seed=seed))
    return positive / positive.sum(1, keepdims=True)


def map_of(axis):
    """What the cells of a map are drawn as: a mesh, or an image where they are many."""
    (drawn,) = [*axis.images, *(one for one in axis.collections if isinstance(one, QuadMesh))]
    return drawn


def marks_of(axis):
    """The places of the dots in a map: (head, layer)."""
    (dots,) = [one for one in axis.collections if isinstance(one, PathCollection)]
    return {tuple(place) for place in dots.get_offsets().tolist()}


def _frontier(titles, **rest):
    points = [plots.Point("0.1", 5.0, 80.0, 1.0), plots.Point("1", -0.1, 78.0)]
    panels = {title: {"gan": points, "mmd auto": points[:1]} for title in titles.values()}
    return plots.frontier(panels, soft={title: plots.Point("", 20.0, 79.0) for title in panels}, **rest)


# kind: a picture of some titles, {anything: title}; the same input each time.
PICTURES = {
    "clouds": lambda t, **rest: plots.clouds(
        {v: (gaussian(7), gaussian(12)) for v in t.values()}, method="pca", **rest
    ),
    "embeddings": lambda t, **rest: plots.embeddings(
        {v: gaussian(9) for v in t.values()}, classes=[0, 1, "$x$"] * 3, method="pca", **rest
    ),
    "neighbourhood": lambda t, **rest: plots.neighbourhood(
        {v: weights(1, 5)[0] for v in t.values()}, node="a", neighbours=TOKENS, classes={"a": 0, "[CLS]": 1}, **rest
    ),
    "reliability": lambda t, **rest: plots.reliability(
        {v: BINS | {"count": [0, 10_000, 0, 300_000]} for v in t.values()}, **rest
    ),
    "attention": lambda t, **rest: plots.attention({v: weights(5, 5) for v in t.values()}, queries=TOKENS, **rest),
    "received": lambda t, **rest: plots.received(
        {v: [weights(5, 5), weights(2, 2)] for v in t.values()}, sentences=[TOKENS, ["one", "two"]], **rest
    ),
    "distance_map": lambda t, **rest: plots.distance_map(
        {v: {"layer.0.self": [0.5, 0.1], "layer.1.self": [-0.01, 0.2]} for v in t.values()}, noise=0.02, **rest
    ),
    "curves": lambda t, **rest: plots.curves(
        {v: {"task_loss": [[2, 1, 0.5], [2, 1.5, 1]], "alignment_loss": [0.2, 0.1, 0.1]} for v in t.values()}, **rest
    ),
    "frontier": _frontier,
}
