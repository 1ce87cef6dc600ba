"""What an alignment tells its user: what is attached, why nothing was captured, and what surely is not meant."""

import sys
import warnings
from types import FrameType

import torch
from torch import Tensor

from alignattn.capture import Tap
from alignattn.capture.projection import frozen
from alignattn.config import AlignmentConfig
from alignattn.errors import AlignmentWarning, CaptureError
from alignattn.matching.matcher import Matcher
from alignattn.weights import Auto

OPTIMIZED_AFTER = 8  # steps


def summary(config: AlignmentConfig, tap: Tap | None) -> str:
    """Which layers and how many heads are attached, and how they are matched."""
    weight = f"{config.weight:g}" if isinstance(config.weight, float | int) else "scheduled"
    if isinstance(config.weight, Auto):
        weight = f"auto (share {config.weight.share:g})"
    how = f"{config.method}, preset {config.preset}, weight {weight} ({config.reduction} over heads and layers)"
    lines = [f"alignattn: {how}, gradient into the {config.generator}"]
    if tap is None:
        return lines[0] + "\nnot attached to a model: record() brings queries and keys"
    heads = sum(site.heads or 0 for site in tap.sites)
    lines.append(f"{type(tap.model).__name__}: {len(tap.sites)} attention modules, {heads} heads")
    longest = max(len(site.name) for site in tap.sites)
    for site in tap.sites:
        shape = f"{site.heads or '?'} heads of {site.width or '?'}"
        note = "" if config.cross or not site.looks_cross else "  cross-attention, left alone"
        lines.append(f"  {site.name:<{longest}}  {shape:<16}  {site.kind}{note}")
    return "\n".join(lines)


def why_nothing(tap: Tap | None) -> str:
    """Why loss() found no queries and keys, and what to do."""
    if tap is None:
        return (
            "alignment.loss() found no queries or keys, and this alignment is attached to no model. Call "
            "align(model, ...), or alignment.record(query, key) in an attention of your own, with gradients enabled."
        )
    start = (
        f"alignment.loss() found no queries or keys. Attached to {len(tap.sites)} attention modules (first: "
        f"{tap.sites[0].name}) and none ran in training mode since the last loss. "
    )
    if not any(site.module.training for site in tap.sites):
        return start + "Call model.train() before the forward pass."
    return start + (
        f"Call the {type(tap.model).__name__} that was aligned itself, as model(...), with gradients enabled. If a "
        "library calls its forward() or one of its parts, or has wrapped it since, align what is called: the "
        "SentenceTransformer rather than its transformer; before deepspeed.initialize. Losses that cache gradients "
        "run the model where alignment cannot reach it."
    )


class Advice:
    """Warnings, each given once; and errors for what would be lost in silence."""

    def __init__(self) -> None:
        self._looked_at_projections = False
        self._told_of_silence = False
        self._looked_for_trainer = False
        self._looked_at_networks = False
        self._told_of_compiled_code = False
        self._first_parameter: Tensor | None = None

    def if_resumed_anew(self) -> None:
        """A Trainer that goes on from a checkpoint, while the adversary or the weight's ramp begins anew."""
        if self._looked_for_trainer or torch.compiler.is_compiling():
            return
        self._looked_for_trainer = True
        trainer = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
        frame: FrameType | None = sys._getframe() if trainer is not None else None
        while frame is not None:
            host = frame.f_locals.get("self")
            if trainer is not None and isinstance(host, trainer) and host.state.global_step > 0:
                raise CaptureError(
                    f"The Trainer goes on from step {host.state.global_step}, and the alignment's networks and weight "
                    "would begin anew. Pass callbacks=[alignment.callback()] to the Trainer, which restores them from "
                    "the checkpoint, or call alignment.restore(folder) before."
                )
            frame = frame.f_back

    def if_frozen(self, tap: Tap | None) -> None:
        """The projections take no gradient: alignment has nothing to move."""
        if tap is None or self._looked_at_projections:
            return
        self._looked_at_projections = True
        if all(frozen(site.module) for site in tap.sites):
            _warn(
                f"The query and key projections of all {len(tap.sites)} attached attention modules are frozen: "
                "alignment can change nothing about them. Train them too (for LoRA, put them into target_modules)."
            )

    def of_compiled_code(self, weight: float) -> None:
        """`auto` sees no gradients there."""
        if not self._told_of_compiled_code:
            self._told_of_compiled_code = True
            _warn(
                f"weight='auto' sees no gradients in compiled code, and stays at its first weight, {weight:g}. Give a "
                "number to choose another."
            )

    def of_silence(self, tap: Tap | None) -> None:
        """A training forward ran and recorded nothing."""
        if tap is None or self._told_of_silence:
            return
        self._told_of_silence = True
        _warn(
            f"A training forward of {type(tap.model).__name__} ran, and nothing is aligned: of the {len(tap.sites)} "
            "attached attention modules none took part in it, or only in eval mode, without gradients, or as "
            "cross-attention. Choose other layers=, put them in training mode, or say cross=True."
        )

    def if_nobody_optimizes(self, matcher: Matcher, method: str, steps: int) -> None:
        """A joint optimizer must have been given the networks. Looked at once: to compare, a device is waited for."""
        parameter = next(iter(matcher.parameters()), None)
        if parameter is None or steps == 0 or self._looked_at_networks:
            return
        start = self._first_parameter
        if start is None:
            self._first_parameter = parameter.detach().clone()
            return
        self._looked_at_networks = steps >= OPTIMIZED_AFTER
        if self._looked_at_networks and torch.equal(start, parameter.to(start)):
            _warn(
                f"The networks of method {method!r} have not moved in {steps} steps. With adversary_optimizer=None, "
                "put alignment.parameters() into an optimizer of your own."
            )


def _warn(message: str) -> None:
    warnings.warn(message, AlignmentWarning, stacklevel=2)
