"""The overall attention that each token receives: received_j = 1/n sum_i weights_ij, 1/m where it is shared evenly."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from alignattn.errors import ConfigError, ShapeError
from alignattn.plots.colours import DARK, by_kind
from alignattn.plots.heat import LABEL, label_columns, room_for
from alignattn.plots.panels import checked, explain, finite, foot, given, label, matplotlib_for, owner_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from alignattn.plots.panels import Array, Given

HEIGHT = 1.0  # inches, of the bars of a sentence
TOKEN = (0.2, 0.3)  # inches for a token: with one kind of attention, and what another adds at most
WIDEST, NARROWEST = 9.0, 2.6
BARS = 64  # tokens; more are lines
EVENLY = "shared evenly"


def received(
    kinds: Mapping[str, Sequence[Any]], *, sentences: Sequence[Sequence[str]], axes: "Given" = None
) -> "list[Axes]":
    """Draw what each token of several sentences receives, the kinds of attention side by side.

    `kinds` maps each title to one array a sentence: weights [n, m], the mean of the heads, of which the mean over the
    queries is drawn, or that mean itself, [m]. `sentences` are their tokens. Each sentence has a panel, with a dashed
    line where every token would receive the same; all have one scale. `axes`, one for each sentence, are drawn on if
    given.
    """
    matplotlib_for("received()")
    sentences = _sentences(sentences)
    shares = {
        title: _shares(title, arrays, sentences) for title, arrays in checked(kinds, "received()", "weights").items()
    }
    drawn = _stacked(sentences, list(shares)) if axes is None else given(axes, len(sentences))
    colours = by_kind(shares)
    highest = max(float(share.max()) for arrays in shares.values() for share in arrays)
    for number, (axis, tokens) in enumerate(zip(drawn, sentences, strict=True)):
        for place, (title, arrays) in enumerate(shares.items()):
            style: dict[str, Any] = {"color": colours[title], "label": label(title)}
            if len(tokens) > BARS:
                axis.step(range(len(tokens)), arrays[number], where="mid", linewidth=0.8, alpha=0.8, **style)
                continue
            width = 0.8 / len(shares)
            left = [token - 0.4 + place * width for token in range(len(tokens))]
            axis.bar(left, arrays[number], width, align="edge", linewidth=0, **style)
        axis.axhline(1 / len(tokens), color=DARK, linewidth=0.7, linestyle="--", label=label(EVENLY))
        axis.set(xlim=(-0.6, len(tokens) - 0.4), ylim=(0, 1.05 * highest or 1.0))
        label_columns(axis, tokens, rotation=90 if _crowded(axis, tokens) else 0)
        axis.locator_params(axis="y", nbins=4)
        axis.tick_params(axis="y", labelsize=LABEL)
        axis.set_ylabel("attention\nreceived", fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    explain(owner_of(drawn[0]), drawn, [*shares, EVENLY], own=axes is None)
    return drawn


def _stacked(sentences: Sequence[Sequence[str]], kinds: Sequence[str]) -> "list[Axes]":
    """One panel below another, each as wide as its sentence, or all that is right for a page."""
    from matplotlib.figure import Figure

    each = min(TOKEN[0] + 0.06 * (len(kinds) - 1), TOKEN[1])
    widths = [min(max(len(tokens) * each, NARROWEST), WIDEST) for tokens in sentences]
    rooms = [room_for(tokens) + 0.2 for tokens in sentences]
    left = 0.75
    width = left + max(widths) + 0.1
    height = foot([*kinds, EVENLY], width) + sum(HEIGHT + room for room in rooms)
    figure = Figure(figsize=(width, height))
    top, drawn = height, []
    for own, room in zip(widths, rooms, strict=True):
        bottom = top - HEIGHT - 0.1
        drawn.append(figure.add_axes((left / width, bottom / height, own / width, HEIGHT / height)))
        top -= HEIGHT + room
    return drawn


def _crowded(axis: "Axes", tokens: Sequence[str]) -> bool:
    """Whether tokens would run into each other if they stood upright."""
    inches = axis.get_window_extent().width / owner_of(axis).dpi
    return len(tokens) * room_for(tokens) > inches


def _sentences(sentences: Any) -> list[list[str]]:
    if isinstance(sentences, str) or not sentences or any(isinstance(one, str) or not len(one) for one in sentences):
        raise ConfigError("received() needs sentences: a list of lists of tokens, one token or more each.")
    return [[str(token) for token in tokens] for tokens in sentences]


def _shares(title: str, arrays: Any, sentences: list[list[str]]) -> "list[Array]":
    if len(arrays) != len(sentences):
        raise ShapeError(f"{title!r} has weights for {len(arrays)} sentences, and {len(sentences)} were given.")
    shares = []
    for number, (weights, tokens) in enumerate(zip(arrays, sentences, strict=True)):
        what = f"The weights of {title!r} in sentence {number}"
        share = finite(weights, what, "Leave out the queries that attend to nothing.")
        share = share.mean(0) if share.ndim == 2 and len(share) else share
        if share.shape != (len(tokens),):
            raise ShapeError(
                f"{what} must be [queries, keys] or [keys] with {len(tokens)} keys, one a token; got shape "
                f"{tuple(share.shape)}."
            )
        if (share < 0).any():
            raise ConfigError(f"{what} are negative in the mean of a token: these are no attention weights.")
        shares.append(share)
    return shares
