"""The attention weights of a model as it computes them: softmax(query keyᵀ · scale + bias)."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from alignattn.capture import QueryKey, Tap
from alignattn.capture.feed import feed, in_eval_mode
from alignattn.capture.querykey import HIDDEN
from alignattn.errors import ConfigError, NothingCapturedError


@torch.no_grad()
def attention_of(
    model: nn.Module,
    batch: Any,
    layer: int | str,
    *,
    repeat: int = 0,
    call: Callable[[nn.Module, Any], object] = feed,
) -> Float[Tensor, "b h n m"]:
    """The attention weights [b, h, n, m] of one attention module on a batch, in eval mode.

    With the module's own scale, masks and position biases: what it gathers values by, whichever implementation of
    attention it runs; a sink beside the keys is left out. `layer` is a number or a name, as in `align(layers=...)`;
    cross-attention has its place among them. `repeat` tells which call it is where a module runs several times in a
    pass, as in ALBERT. A query that may see no key has a row of zeros. `call` feeds the batch to the model: by default
    a mapping as keyword arguments. The model computes what it always does, and is left as it was.
    """
    return weights_of(call_of(model, batch, layer, repeat=repeat, call=call, who="attention_of()"), slice(None))


def call_of(
    model: nn.Module, batch: Any, layer: int | str, *, repeat: int, call: Callable[[nn.Module, Any], object], who: str
) -> QueryKey:
    """One call of one attention module on a batch in eval mode, with how it weighs its keys."""
    found: list[QueryKey] = []
    tap = Tap(model, watch=found.append, always=True, attending=True, layers=layer, cross=True)
    try:
        if len(tap.sites) > 1:
            names = ", ".join(site.name for site in tap.sites)
            raise ConfigError(f"{who} takes one layer, and layer={layer!r} are {len(tap.sites)}: {names}.")
        with in_eval_mode(model):
            call(model, batch)
    finally:
        tap.remove()
    if not found:
        raise NothingCapturedError(f"{tap.sites[0].name} did not run on this batch.")
    if not -len(found) <= repeat < len(found):
        raise ConfigError(f"repeat={repeat}: {tap.sites[0].name} ran {len(found)} times on this batch.")
    return found[repeat]


def weights_of(record: QueryKey, rows: slice) -> Float[Tensor, "b h r m"]:
    """Of these queries, in single precision; zeros where a query may see no key."""
    assert record.attending is not None
    logits = record.attending.logits_of(record.query, record.key, rows)
    seen = logits > HIDDEN  # neither masked nor NaN, which may stand in padding
    weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
    return weights.masked_fill(~seen, 0.0)
