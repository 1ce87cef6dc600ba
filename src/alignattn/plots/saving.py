"""Pictures as files: whole or not at all, and equal pictures as equal bytes.

Letters in an svg are outlines, so that a page that holds it needs no font.
"""

from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alignattn.errors import ConfigError, unknown
from alignattn.files import write_whole
from alignattn.plots.panels import matplotlib_for, owner_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The metadata of each format, without the date: equal figures are to be equal files.
UNDATED: dict[str, dict[str, str | None]] = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
# Otherwise the names inside an svg are random, and its letters whatever rcParams say.
SETTINGS = {"svg.hashsalt": "alignattn", "svg.fonttype": "path"}


def save(picture: "Axes | Iterable[Axes] | Figure", path: str | Path, *, dpi: int = 200) -> None:
    """Write axes, with all of their figure, or a figure as png, svg or pdf, by the suffix of `path`."""
    mpl = matplotlib_for("save()")
    path = Path(path)
    suffix = path.suffix.removeprefix(".").lower()
    if suffix not in UNDATED:
        raise unknown("picture format", suffix, UNDATED)
    figure = _figure(picture)
    written = BytesIO()
    with mpl.rc_context(SETTINGS):
        figure.savefig(written, format=suffix, dpi=dpi, metadata=UNDATED[suffix])
    write_whole(path, written.getvalue())


def _figure(picture: Any) -> "Figure":
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

    many = isinstance(picture, Iterable) and not isinstance(picture, Axes | FigureBase)
    parts = list(np.ravel(list(picture))) if many else [picture]
    if not parts or not all(isinstance(part, Axes | FigureBase) for part in parts):
        raise ConfigError(f"save() takes axes or a figure, got {picture!r:.80}.")
    owners = {owner_of(part) for part in parts}
    if len(owners) > 1:
        raise ConfigError(f"save() writes one figure, and these axes belong to {len(owners)}.")
    return owners.pop()
