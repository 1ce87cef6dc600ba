"""Alignment attention: any attention model trains with the distributions of its keys and queries matched.

Names are imported when they are first used, so that `alignattn --help` need not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from alignattn import functional
    from alignattn.alignment import Alignment, align
    from alignattn.config import AlignmentConfig
    from alignattn.coordinates import rebase
    from alignattn.diagnosis.measure import diagnose
    from alignattn.errors import AlignmentError, AlignmentWarning
    from alignattn.matching.matcher import Matcher
    from alignattn.weights import Auto, Ramp

__version__ = "0.1.0"
__all__ = [
    "Alignment",
    "AlignmentConfig",
    "AlignmentError",
    "AlignmentWarning",
    "Auto",
    "Matcher",
    "Ramp",
    "__version__",
    "align",
    "diagnose",
    "functional",
    "rebase",
]

_HOMES = {
    "Alignment": "alignment",
    "AlignmentConfig": "config",
    "AlignmentError": "errors",
    "AlignmentWarning": "errors",
    "Auto": "weights",
    "Matcher": "matching.matcher",
    "Ramp": "weights",
    "align": "alignment",
    "diagnose": "diagnosis.measure",
    "rebase": "coordinates",
}


def __getattr__(name: str) -> Any:
    if name == "functional":
        return import_module("alignattn.functional")
    if name in _HOMES:
        return getattr(import_module(f"alignattn.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'alignattn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
