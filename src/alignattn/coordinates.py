"""Queries and keys brought together without any training, and without any effect on what the model computes.

Two things about them are free. Their product does not feel the basis they are written in (capture/basis.py), and
softmax does not feel a shift of all keys (capture/keybias.py):

    q → q A        k → (k A⁻¹) + c        A symmetric, A² Σ_q A² = Σ_k,    c = E[q A] − E[k A⁻¹]

Both sides then have the same mean and the same covariance in every head. A² is the map that carries a Gaussian of
covariance Σ_q to one of Σ_k at least cost; A is half of that way, and keys come to meet it. What is left between the
two distributions is what no choice of coordinates removes. (Departure: the paper's measure of distance depends on
that choice, and all that it removes here costs nothing and gains nothing but the distance itself.)
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from alignattn.capture import QueryKey, Tap
from alignattn.capture.basis import EXACT, shared_parameters
from alignattn.capture.feed import feed, in_eval_mode
from alignattn.capture.keybias import are_projected
from alignattn.capture.tap import Layers
from alignattn.errors import NothingCapturedError

STRETCH = 10.0  # no direction is made longer or shorter by more

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
    precision. `batches`, a few hundred samples of the data, tell the means and covariances; `call` feeds one to the
    model. Do it before training, or after: optimizers and averages of weights keep the old coordinates.
    """
    moments: dict[str, _Moments] = {}
    free: dict[str, Tensor] = {}

    def watch(record: QueryKey) -> None:
        if record.name not in tap.bases:
            return
        if tap.bases[record.name].projections is not None:
            same = are_projected(record.query, record.query_output) & are_projected(record.key, record.key_output)
            free[record.name] = free[record.name] & same if record.name in free else same
        seen = _Moments.of(record)
        moments[record.name] = moments[record.name] + seen if record.name in moments else seen

    tap = Tap(model, watch=watch, always=True, layers=layers, bases=True, key_biases=True, cross=True)
    ran = False
    try:
        with in_eval_mode(model):
            for batch in batches:
                call(model, batch)
                ran = True
    finally:
        tap.remove()
    if not ran:
        raise NothingCapturedError("There were no batches to tell how queries and keys are distributed.")
    shared = shared_parameters(model)
    changed = []
    for name, found in moments.items():
        own = tap.bases[name].parameters()
        if bool(free.get(name, True)) and not any(p.dtype not in EXACT or p in shared for p in own):
            _rebase_one(tap, name, found)
            changed.append(name)
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
