"""What plans between the tokens of short problems cost, where nothing is differentiated: five launches in all.

Tokens are placed as the divergence's are (about_origin.py), so that products of theirs are scores as they come, and the
rest is that of stored scores (stored_scores.py). With torch placing takes two dozen launches, which take Python longer
than the device takes to solve.
"""

import math

import torch
from torch import Tensor

from alignattn.matching.divergence import Asked
from alignattn.matching.kernels import EXACT
from alignattn.matching.kernels.about_origin import place
from alignattn.matching.kernels.stored_scores import scores_of, solved, value_of
from alignattn.matching.tokens import chunks_of

Values = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def values(query: Tensor, key: Tensor, query_mask: Tensor | None, key_mask: Tensor | None, asked: Asked) -> Values:
    """Costs, regularised costs, marginal errors, iterations and epsilons [b h]; queries and keys [b, h, tokens, d]."""
    (samples, heads, n, _), m = query.shape, key.shape[2]
    problems = samples * heads
    unit = asked.epsilon * math.log(2)  # of what exponents of two cost
    scale, limit = asked.scale / math.sqrt(unit), asked.limit / math.sqrt(unit)
    starts = query.new_empty(problems, 2, n + m)
    sides = query, key, query_mask, key_mask
    placed = place(*sides, scale=scale, limit=limit, products=EXACT, start=starts)
    by, epsilon = placed.facts[:, 0].square(), query.new_full((problems,), asked.epsilon)
    found: list[Values] = []
    step = chunks_of(problems, n * m, query.device)
    for some in (slice(first, first + step) for first in range(0, problems, step)):
        of_queries, of_keys = (some, slice(0, n)), (some, slice(n, None))
        x, y = ((placed.high[side], placed.low[side]) for side in (of_queries, of_keys))
        log_a, log_b = placed.log_marginal[of_queries], placed.log_marginal[of_keys]
        scores = scores_of(x, y, by[some], placed.parts)
        f, g, iterations = solved(
            scores, log_a, log_b, starts[some, 0, n:], asked.iterations, asked.tolerance, bits=True
        )
        alpha, beta = placed.squares[of_queries], placed.squares[of_keys]
        cost, regularised, error = value_of(scores, f, g, alpha, beta, log_a, log_b, epsilon[some], worth=unit)
        found.append((cost, regularised, error, iterations, epsilon[some]))
    return found[0] if len(found) == 1 else tuple(map(torch.cat, zip(*found, strict=True)))  # type: ignore[return-value]
