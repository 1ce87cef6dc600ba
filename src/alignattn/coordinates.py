"""Queries and keys brought together without any training, and without any effect on what the model computes.

Two things about them are free. Their product does not feel the basis they are written in (capture/basis.py), and
softmax does not feel a shift of all keys (capture/keybias.py):

    q → q A        k → (k A⁻¹) + c        A symmetric, A² Σ_q A² = Σ_k,    c = E[q A] − E[k A⁻¹]

Both sides then have the same mean and the same covariance in every head, as far as no direction need be stretched more
than tenfold. A² is the map that carries a Gaussian of covariance Σ_q to one of Σ_k at least cost; A
is half of that way, and keys come to meet it. Other coordinates may be closer still by another measure. (Departure: the
paper's measure depends on the choice, and what that removes costs nothing and gains nothing but the distance.)
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float
from torch import Tensor, nn

from alignattn.capture import QueryKey, Tap
from alignattn.capture.basis import EXACT, shared_parameters
from alignattn.capture.feed import feed, in_eval_mode
from alignattn.capture.keybias import are_projected
from alignattn.capture.search import Layers
from alignattn.errors import AlignmentError, NothingCapturedError
from alignattn.processes import several

STRETCH = 10.0  # no direction is made longer or shorter by more
FELT = 3e-4  # of an output's size: a change that is no rounding

Double = Float[Tensor, "*shape"]


@torch.no_grad()
def rebase(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    layers: Layers = None,
    call: Callable[[nn.Module, Any], object] = feed,
) -> list[str]:
    """Give queries and keys of each head the same mean and covariance, in place; no output of the model changes.

    Returns the attention modules that were changed. Left as they are: those whose queries or keys are rotated,
    normalised or scaled behind their projections, have no projections of their own, or are kept in less than single
    precision; and those whose outputs change nevertheless, on the first of the batches. `batches`, a few hundred
    samples of the data, tell the means and covariances; of several processes the first one's do. `call` feeds one to
    the model: mappings by name, tuples one by one. Do it before training, or after: optimizers and averages of weights
    keep the old coordinates. Before a model is sharded (FSDP).
    """
    if any(hasattr(parameter, "placements") for parameter in model.parameters()):
        raise AlignmentError("The model is sharded. Call rebase before fully_shard, or on one process, on the whole.")
    telling = _Telling(model, layers)
    first: Any = None
    ran = False
    try:
        with in_eval_mode(model):
            for batch in batches:
                call(model, batch)
                first, ran = (first if ran else batch), True
    finally:
        telling.tap.remove()
    if not ran:
        raise NothingCapturedError("There were no batches to tell how queries and keys are distributed.")
    changed = []
    with in_eval_mode(model):
        before = _outputs(model, first, call, telling.tap)
        for name in telling.free(shared_parameters(model)):
            parameters = telling.tap.bases[name].parameters()
            old = [parameter.clone() for parameter in parameters]
            _rebase_one(telling.tap, name, telling.moments[name])
            if _same(before, _outputs(model, first, call, telling.tap)):
                changed.append(name)
            else:
                for parameter, value in zip(parameters, old, strict=True):
                    parameter.copy_(value)
    return _as_the_first_process(telling.tap, changed)


class _Telling:
    """What batches tell about queries and keys, and whether anything comes behind their projections."""

    def __init__(self, model: nn.Module, layers: Layers) -> None:
        self.moments: dict[str, _Moments] = {}
        self._same: dict[str, Tensor] = {}
        self._long: set[str] = set()  # at one token alone a rotation by position is none
        self.tap = Tap(model, watch=self._watch, always=True, layers=layers, bases=True, key_biases=True, cross=True)

    def _watch(self, record: QueryKey) -> None:
        name = record.name
        if name not in self.tap.bases:
            return
        if self.tap.bases[name].projections is not None:
            same = are_projected(record.query, record.query_output) & are_projected(record.key, record.key_output)
            self._same[name] = self._same[name] & same if name in self._same else same
        if min(record.query.shape[2], record.key.shape[2]) > 1:
            self._long.add(name)
        seen = _Moments.of(record)
        self.moments[name] = self.moments[name] + seen if name in self.moments else seen

    def free(self, shared: set[nn.Parameter]) -> list[str]:
        """Modules whose coordinates can be chosen, as far as can be told from outside."""
        return [
            name
            for name in self.moments
            if name in self._long
            and bool(self._same.get(name, True))
            and not any(p.dtype not in EXACT or p in shared for p in self.tap.bases[name].parameters())
        ]


def _outputs(model: nn.Module, batch: Any, call: Callable[[nn.Module, Any], object], tap: Tap) -> list[Tensor]:
    """What the attention modules, and the model, make of a batch."""
    found: list[Tensor] = []
    handles = [
        site.module.register_forward_hook(lambda _, __, output: found.extend(_tensors(output))) for site in tap.sites
    ]
    try:
        found += _tensors(call(model, batch))
    finally:
        for handle in handles:
            handle.remove()
    return found


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value.detach()] if value.is_floating_point() else []
    inner = list(value.values()) if isinstance(value, Mapping) else value
    return [t for one in inner for t in _tensors(one)] if isinstance(inner, tuple | list) else []


def _same(before: list[Tensor], after: list[Tensor]) -> bool:
    """But for rounding."""
    if len(before) != len(after):
        return False
    for one, other in zip(before, after, strict=True):
        finite = one.isfinite()
        size = one[finite].abs().max() if bool(finite.any()) else one.new_zeros(())
        tolerance = FELT * (1 if one.dtype != torch.float64 else 1e-4)
        if not bool(((other - one)[finite].abs() <= tolerance * size.clamp_min(1e-3)).all()):
            return False
    return True


def _as_the_first_process(tap: Tap, changed: list[str]) -> list[str]:
    """Replicas must stay replicas: all take what the first has come to."""
    if several():
        names = [changed]
        dist.broadcast_object_list(names, src=0)
        changed = names[0]
        for name in sorted(tap.bases):
            for parameter in tap.bases[name].parameters():
                dist.broadcast(parameter.data, src=0)
    return changed


def _rebase_one(tap: Tap, name: str, moments: "_Moments") -> None:
    basis, bias = tap.bases[name], tap.key_biases.get(name)
    groups = basis.key.size // moments.sums.shape[-1]
    means, covariances = moments.by_group(groups, about_means=bias is not None)
    forth, back = meeting_maps(*covariances)  # (groups, d, d) each
    basis.query.turn(forth.repeat_interleave(basis.query.size // basis.key.size, 0))
    basis.key.turn(back)
    if bias is not None:
        gap = means[0][:, None] @ forth - means[1][:, None] @ back  # (groups, 1, d)
        bias.shift(gap.flatten(), frozen_too=True)


def meeting_maps(first: Float[Tensor, "g d d"], second: Float[Tensor, "g d d"]) -> tuple[Tensor, Tensor]:
    """Symmetric A and A⁻¹ with A first A = A⁻¹ second A⁻¹, as far as no direction is stretched too much."""
    root, unroot = _power(first, 0.5), _power(first, -0.5)
    squared = unroot @ _power(root @ second @ root, 0.5) @ unroot  # A²
    values, vectors = torch.linalg.eigh((squared + squared.mT) / 2)
    stretch = values.clamp_min(0).sqrt().clamp(1 / STRETCH, STRETCH)
    return (vectors * stretch[..., None, :]) @ vectors.mT, (vectors / stretch[..., None, :]) @ vectors.mT


def _power(matrix: Float[Tensor, "g d d"], exponent: float) -> Float[Tensor, "g d d"]:
    """Of a symmetric matrix without negative eigenvalues but by rounding."""
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    floor = values[..., -1:] * matrix.shape[-1] * torch.finfo(matrix.dtype).eps
    values = values.clamp_min(floor.clamp_min(torch.finfo(matrix.dtype).tiny))
    result: Tensor = (vectors * values.pow(exponent)[..., None, :]) @ vectors.mT
    return result


@dataclass(frozen=True)
class _Moments:
    """Sums over tokens, in double precision: of queries and of keys."""

    counts: Double  # [2]
    sums: Double  # [2, h, d]
    squares: Double  # [2, h, d, d]

    @classmethod
    def of(cls, record: QueryKey) -> "_Moments":
        sides = [_valid(record.query, record.query_mask), _valid(record.key, record.key_mask)]
        return cls(
            torch.tensor([float(len(side)) for side in sides], dtype=torch.float64, device=record.query.device),
            torch.stack([side.sum(0) for side in sides]),
            torch.stack([torch.einsum("thd,the->hde", side, side) for side in sides]),
        )

    def __add__(self, other: "_Moments") -> "_Moments":
        return _Moments(self.counts + other.counts, self.sums + other.sums, self.squares + other.squares)

    def by_group(self, groups: int, *, about_means: bool) -> tuple[Double, Double]:
        """Means [2, g, d] and second moments [2, g, d, d] of the query heads that share a key head, taken together."""
        counts = self.counts.clamp_min(1)
        means = self.sums / counts[:, None, None]
        moments = self.squares / counts[:, None, None, None]
        if about_means:
            moments = moments - means[..., :, None] * means[..., None, :]
        width = means.shape[-1]
        # Few tokens know little of many directions: the rest is taken to be alike in all.
        trust = 1 - (width / counts).clamp_max(1)[:, None, None, None]
        size = moments.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
        round_ones = size * torch.eye(width, dtype=moments.dtype, device=moments.device)
        moments = trust * moments + (1 - trust) * round_ones
        return means.unflatten(1, (groups, -1)).mean(2), moments.unflatten(1, (groups, -1)).mean(2)


def _valid(tokens: Float[Tensor, "b h n d"], mask: Bool[Tensor, "b n"] | None) -> Float[Tensor, "t h d"]:
    lined_up = tokens.transpose(1, 2).double()  # (b, n, h, d)
    return lined_up.flatten(0, 1) if mask is None else lined_up[mask]
