"""How far apart the keys and queries of each head are: unbiased squared MMD, of a whole model or of one call."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from alignattn.capture import QueryKey, Tap
from alignattn.capture.feed import in_eval_mode
from alignattn.errors import NothingCapturedError
from alignattn.matching.discrepancy import Bandwidth, mmd


@torch.no_grad()
def discrepancy(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    bandwidth: Bandwidth = "median",
    without_own: bool = False,
    call: Callable[[nn.Module, Any], object] = lambda model, batch: model(batch),
) -> dict[str, Tensor]:
    """Unbiased squared MMD between keys and queries: name of the attention module to one value a head, float64.

    The mean over the samples of all batches that have two valid tokens or more on both sides, since fewer tell
    nothing. A module that is called several times in a pass, as in ALBERT, is a layer each time: `name`, `name#1`,
    and so on. `without_own` leaves out a token's query against its own key, as `mmd` has it. `call` feeds a batch to
    the model.
    """
    sums: dict[str, Tensor] = {}
    counts: dict[str, Tensor] = {}

    def measure(record: QueryKey) -> None:
        layer = layer_of(record)
        values, enough = of_samples(record.unpacked(), bandwidth=bandwidth, without_own=without_own)
        sums[layer] = sums[layer] + values.sum(0) if layer in sums else values.sum(0)
        counts[layer] = counts[layer] + enough.sum() if layer in counts else enough.sum()

    tap = Tap(model, watch=measure, always=True)
    try:
        with in_eval_mode(model):
            for batch in batches:
                call(model, batch)
    finally:
        tap.remove()
    if not sums:
        raise NothingCapturedError("No attention ran: there were no batches, or none of them reached it.")
    return {name: total / counts[name].clamp_min(1) for name, total in sums.items()}


def layer_of(record: QueryKey) -> str:
    """`name`, or `name#1` and so on where the module had been called before in the same pass."""
    return f"{record.name}#{record.call}" if record.call else record.name


def of_samples(
    record: QueryKey, *, bandwidth: Bandwidth = "median", without_own: bool = False
) -> tuple[Float[Tensor, "b h"], Bool[Tensor, " b"]]:
    """Unbiased squared MMD of each sample, and which of them have tokens enough to tell; the others are zero."""
    values = mmd(
        record.query.float(),
        record.key.float(),
        query_mask=record.query_mask,
        key_mask=record.key_mask,
        bandwidth=bandwidth,
        without_own=without_own,
    )
    enough = _at_least_two(record.query, record.query_mask) & _at_least_two(record.key, record.key_mask)
    return values.double() * enough[:, None], enough


def _at_least_two(tokens: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return torch.full(tokens.shape[:1], tokens.shape[2] >= 2, device=tokens.device)
    return mask.sum(-1) >= 2
