"""What can go wrong, each with a message that says what was seen and what to do."""

from collections.abc import Iterable
from difflib import get_close_matches


class AlignmentError(Exception):
    """Every error that alignattn raises on purpose."""


class ConfigError(AlignmentError, ValueError):
    """An option, method, preset or weight that cannot be."""


class ShapeError(AlignmentError, ValueError):
    """Queries, keys or masks whose shapes or types don't fit together."""


class UnsupportedModelError(AlignmentError, TypeError):
    """A model whose attention cannot be reached."""


class CaptureError(AlignmentError, RuntimeError):
    """Attention was not recorded, or what was recorded was not used, as alignment needs it."""


class NothingCapturedError(CaptureError):
    """A loss was asked for and no query or key had been recorded."""


class NonFiniteError(AlignmentError, FloatingPointError):
    """NaN or infinity in queries or keys."""


class AlignmentWarning(UserWarning):
    """Something works but surely not as it was meant."""


def unknown(kind: str, value: object, choices: Iterable[str]) -> ConfigError:
    """The error for a name that is none of `choices`; it lists them, the nearest first named."""
    names = list(choices)
    near = get_close_matches(str(value), names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ConfigError(f"Unknown {kind} {value!r}. Choose one of: {', '.join(names)}.{hint}")
