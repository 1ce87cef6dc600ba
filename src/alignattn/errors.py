"""What can go wrong, each with a message that says what was seen and what to do."""

import functools
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


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


class DataError(AlignmentError, ValueError):
    """A data file that is missing or cannot be read as what it should be."""


class AlignmentWarning(UserWarning):
    """Something works but surely not as it was meant."""


def unknown(kind: str, value: object, choices: Iterable[str]) -> ConfigError:
    """The error for a name that is none of `choices`; it lists them, the nearest first named."""
    names = list(choices)
    near = get_close_matches(str(value), names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ConfigError(f"Unknown {kind} {value!r}. Choose one of: {', '.join(names)}.{hint}")


def checked(check: Callable[..., None]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Call `check` with the arguments first: its errors are for people, those of a type checker are not."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
            check(*args, **kwargs)
            return function(*args, **kwargs)

        return wrapped

    return decorate
