"""The state of an alignment, to continue from: networks, their optimizer, and the clock of the weight."""

import copy
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from alignattn.adversary import Adversary
from alignattn.errors import ConfigError
from alignattn.matching.matcher import Matcher

FORMAT = 1

Rows = dict[tuple[str, int], tuple[int, int]]  # as Matcher.rows


def take(matcher: Matcher, adversary: Adversary | None, *, method: str, steps: int) -> dict[str, Any]:
    """The state as it is."""
    return {
        "format": FORMAT,
        "method": method,
        "steps": steps,
        "rows": [[name, width, bank, row] for (name, width), (bank, row) in matcher.rows.items()],
        "networks": matcher.state_dict(),
        "adversary": {} if adversary is None else adversary.state_dict(),
    }


def put(
    state: dict[str, Any],
    matcher: Matcher,
    adversary: Adversary | None,
    *,
    method: str,
    layers: Collection[str] | None,  # of the model; None: no model is attached
) -> int:
    """Put a state in place, all of it or nothing; returns the steps."""
    if state.get("format") != FORMAT:
        raise ConfigError(f"This state has format {state.get('format')!r}; this version reads {FORMAT}.")
    if state["method"] != method:
        raise ConfigError(f"This state is of method {state['method']!r}, and the alignment of {method!r}.")
    rows: Rows = {(name, width): (bank, row) for name, width, bank, row in state["rows"]}
    strangers = sorted({name for name, _ in rows} - set(layers)) if layers is not None else []
    if strangers:
        raise ConfigError(f"This state is of another model: it has {strangers[0]}, and the model has not.")
    banks, old_rows, before = matcher.banks, matcher.rows, copy.deepcopy(matcher.state_dict())
    try:
        if rows != old_rows:  # otherwise the parameters stay the objects that an optimizer may hold
            _make_banks(matcher, rows)
        matcher.load_state_dict(state["networks"])
        if adversary is not None:
            adversary.load_state_dict(state["adversary"])
    except (RuntimeError, ValueError, KeyError) as error:
        matcher.banks, matcher.rows = banks, old_rows
        matcher.load_state_dict(before)
        raise ConfigError(f"This state does not fit the alignment, which stays as it was: {error}") from error
    return int(state["steps"])


def _make_banks(matcher: Matcher, rows: Rows) -> None:
    """Networks for these layers, in these banks and rows."""
    device = next((t.device for t in matcher.parameters()), torch.device("cpu"))
    matcher.banks, matcher.rows = nn.ModuleList(), {}
    for bank in sorted({bank for bank, _ in rows.values()}):
        members = sorted((row, name, width) for (name, width), (b, row) in rows.items() if b == bank)
        for width in dict.fromkeys(width for _, _, width in members):
            matcher.ensure([name for _, name, w in members if w == width], width, device)
