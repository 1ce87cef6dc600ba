"""How evenly queries look at their keys.

    -Σ_j a_j log a_j / log m,    a the attention weights of a query, m the keys that it may see

One: all keys alike. Zero: one key alone. Weights come of the call as the model makes it: its scale, masks, causal or
not, positions. A query that may see one key has no choice, and is left out.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from alignattn.capture import QueryKey
from alignattn.capture.querykey import HIDDEN
from alignattn.matching.tokens import chunks_of


def entropies(record: QueryKey) -> tuple[Float[Tensor, " h"], Int[Tensor, " h"]]:
    """The sum over valid queries, and how many they are."""
    samples, heads, n, _ = record.query.shape
    assert record.attending is not None
    total = torch.zeros(heads, dtype=torch.float64, device=record.query.device)
    counted = torch.zeros(heads, dtype=torch.int64, device=record.query.device)
    step = chunks_of(n, samples * heads * record.key.shape[2], record.query.device)
    for first in range(0, n, step):
        rows = slice(first, min(first + step, n))
        logits = record.attending.logits_of(record.query, record.key, rows)  # (b, h, r, m)
        seen = logits > HIDDEN  # neither masked nor NaN, which may stand in padding
        if record.key_mask is not None:
            seen &= record.key_mask[:, None, None]
        keys = seen.sum(-1)
        free = keys >= 2
        if record.query_mask is not None:
            free &= record.query_mask[:, None, rows]
        weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
        shares = torch.special.entr(weights).sum(-1) / keys.clamp_min(2).log()
        total += shares.masked_fill(~free, 0.0).double().sum((0, 2))
        counted += free.sum((0, 2))
    return total, counted
