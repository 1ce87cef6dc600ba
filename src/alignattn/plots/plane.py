"""Points of any width in the plane: t-SNE, perplexity = min(30, (points - 1) / 3), or their principal components."""

from typing import TYPE_CHECKING

from alignattn.errors import AlignmentError, unknown
from alignattn.plots.colours import GREY

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from alignattn.plots.panels import Array

METHODS = ("tsne", "pca")
FEWEST = 5  # distinct points: with fewer t-SNE has no neighbourhoods to keep


def check_method(method: str, what: str) -> None:
    """An error names the ways there are."""
    if method not in METHODS:
        raise unknown(f"method of drawing {what}", method, METHODS)


def flattened(points: "Array", method: str, *, seed: int, who: str) -> "Array":
    """Points [n, d] as [n, 2]; `seed` is that of the jitter t-SNE starts from."""
    import numpy as np

    if method == "tsne" and len(np.unique(points, axis=0)) >= FEWEST:
        return _tsne(points, seed, who)
    return _principal(points)


def size_of_dots(count: int) -> float:
    """In square points: many are small."""
    return min(max(2500 / count, 6.0), 30.0)


def frame(axis: "Axes", flat: "Array") -> None:
    """A square around all points, without ticks: directions mean nothing."""
    low, high = flat.min(0), flat.max(0)
    reach = 0.55 * float((high - low).max()) or 1.0  # one for points that all coincide
    middle = (low + high) / 2
    axis.set(xlim=middle[0] + [-reach, reach], ylim=middle[1] + [-reach, reach], aspect="equal", xticks=[], yticks=[])
    axis.spines[:].set(color=GREY, linewidth=0.6)


def _tsne(points: "Array", seed: int, who: str) -> "Array":
    import numpy as np

    try:
        from sklearn.manifold import TSNE
        from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # comes with scikit-learn
    except ImportError as error:
        raise AlignmentError(
            f"{who} needs scikit-learn for t-SNE: pip install 'alignattn[demo]', or choose method='pca'."
        ) from error
    with threadpool_limits(1):  # several threads add up in no fixed order, and t-SNE makes much of a last digit
        points = points - points.mean(0)
        points /= abs(points).max()  # t-SNE has no scale, its float32 has
        start = _principal(points)
        start = 1e-4 * start / start[:, 0].std() + 1e-5 * np.random.default_rng(seed).standard_normal(start.shape)
        perplexity = min(30.0, (len(points) - 1) / 3)
        tsne = TSNE(perplexity=perplexity, init=start.astype(np.float32), random_state=seed)
        return np.asarray(tsne.fit_transform(points), dtype=np.float64)


def _principal(points: "Array") -> "Array":
    """The two directions of most variance, zeros where there is no second one."""
    import numpy as np

    left, scale, _ = np.linalg.svd(points - points.mean(0), full_matrices=False)
    flat = np.zeros((len(points), 2))
    flat[:, : len(scale)] = (left * scale)[:, :2]
    peak = np.take_along_axis(flat, abs(flat).argmax(0)[None], axis=0)  # (1, 2)
    return flat * np.where(peak < 0, -1.0, 1.0)  # the sign of a direction is arbitrary: the farthest point is positive
