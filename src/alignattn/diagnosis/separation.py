"""How well a held-out classifier tells keys from queries.

    AUC = P(score of a query > score of a key),    score = w · (z, z²),   z the standardised vector

w is Fisher's discriminant (least squares on the two labels with a ridge), which a linear solve gives for all heads and
folds at once; squares let it see spread as well as shift. Each token is scored by a classifier that saw no token of its
sample: those of one sentence are alike. One half: they cannot be told apart.

The interval is DeLong's with samples for clusters (Obuchowski 1997), on the logit scale: samples, not tokens, are what
was drawn at random. That takes the classifiers as given; but a fold is tested on what the others were taught by, and
where nothing can be told two folds that chance has made alike both succeed: the variance is twice that, and intervals
held a half in 83 of 100 cases. So it is multiplied by 1 + folds / (folds - 1), as Nadeau and Bengio (2003) do, which is
right there and careful elsewhere.
"""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from alignattn.diagnosis.draws import mixed, ranks, start

FOLDS = 5
WIDTH = 1.959964  # of an interval of 95 %, in standard errors


class Sampled:
    """Tokens of one side, at most `most` of them, drawn at random from all that come by."""

    def __init__(self, most: int, seed: int) -> None:
        self.most, self.seed = most, seed
        self.tokens: Tensor | None = None  # [t, h, d]
        self.sample: Tensor | None = None  # [t]
        self._order: Tensor | None = None

    def add(self, tokens: Float[Tensor, "b h n d"], mask: Bool[Tensor, "b n"], sample: Int[Tensor, " b"]) -> None:
        """Those with the smallest of random numbers stay: a token's own, whatever comes with it."""
        order = mixed(*start(self.seed, sample[:, None], mask.device), ranks(mask))[mask]  # (t,)
        found = tokens.transpose(1, 2)[mask], sample[:, None].expand_as(mask)[mask], order
        if self.tokens is not None and self.sample is not None and self._order is not None:
            found = (
                torch.cat([self.tokens, found[0]]),
                torch.cat([self.sample, found[1]]),
                torch.cat([self._order, found[2]]),
            )
        if len(found[2]) > self.most:
            kept = found[2].topk(self.most, largest=False).indices
            found = found[0][kept], found[1][kept], found[2][kept]
        self.tokens, self.sample, self._order = found


def separation(query: Sampled, key: Sampled) -> tuple[Float[Tensor, " h"], Float[Tensor, "h 2"]]:
    """AUC and its interval, for every head; NaN where there are no two samples to hold one out of."""
    assert query.tokens is not None and key.tokens is not None and query.sample is not None and key.sample is not None
    heads, device = query.tokens.shape[1], query.tokens.device
    sample = torch.cat([query.sample, key.sample])
    is_query = torch.arange(len(sample), device=device) < len(query.sample)
    names, cluster = torch.unique(sample, return_inverse=True)
    both = _has(cluster[is_query], len(names)) & _has(cluster[~is_query], len(names))
    if int(both.sum()) < 2:
        nothing = torch.full((heads, 3), math.nan, dtype=torch.float64, device=device)
        return nothing[:, 0], nothing[:, 1:]
    # Samples in a random order are dealt out, those with both sides first: no fold is left without either.
    order = mixed(*start(query.seed, names, device)).argsort()
    order = order[torch.argsort(~both[order], stable=True)]
    folds = min(FOLDS, int(both.sum()))
    fold = torch.empty_like(order)
    fold[order] = torch.arange(len(order), device=device) % folds
    scores = _held_out_scores(_features(torch.cat([query.tokens, key.tokens])), is_query, fold[cluster], folds)
    return _areas(scores, is_query, fold[cluster], cluster)


def _has(cluster: Int[Tensor, " t"], count: int) -> Bool[Tensor, " c"]:
    return torch.bincount(cluster, minlength=count) > 0


def _features(tokens: Float[Tensor, "t h d"]) -> Float[Tensor, "h t f"]:
    """(z, z²), each of mean zero and deviation one over queries and keys together. They know no label."""
    z = _standardised(tokens.transpose(0, 1).float())
    return torch.cat([z, _standardised(z.square())], -1)


def _standardised(values: Float[Tensor, "h t d"]) -> Float[Tensor, "h t d"]:
    values = values - values.mean(1, keepdim=True)
    deviation = values.square().mean(1, keepdim=True).sqrt()
    size = values.abs().amax((1, 2), keepdim=True)
    return values / torch.where(deviation > 1e-6 * size, deviation, torch.inf)  # what does not vary tells nothing


def _held_out_scores(
    features: Float[Tensor, "h t f"], is_query: Bool[Tensor, " t"], fold: Int[Tensor, " t"], folds: int
) -> Float[Tensor, "h t"]:
    width = features.shape[2]
    grams, pulls = [], []
    for i in range(folds):
        mine = features[:, fold == i]
        # Each side counts one half, however many there are of it: an intercept is not needed, nor would AUC feel it.
        labels = torch.where(is_query[fold == i], 1 / is_query.sum(), -1 / (~is_query).sum())
        grams.append((mine.mT @ mine).double())
        pulls.append((labels.to(mine.dtype) @ mine).double())  # (h, f)
    gram, pull = torch.stack(grams).sum(0), torch.stack(pulls).sum(0)
    scores = torch.empty(features.shape[:2], dtype=torch.float64, device=features.device)
    for i in range(folds):
        left = int((fold != i).sum())
        ridge = width * torch.eye(width, dtype=gram.dtype, device=gram.device)  # as if seen once in each direction
        weights = torch.linalg.solve(gram - grams[i] + ridge, (pull - pulls[i]) * left)  # (h, f)
        scores[:, fold == i] = torch.einsum("htf,hf->ht", features[:, fold == i].double(), weights)
    return scores


def _areas(
    scores: Float[Tensor, "h t"], is_query: Bool[Tensor, " t"], fold: Int[Tensor, " t"], cluster: Int[Tensor, " t"]
) -> tuple[Float[Tensor, " h"], Float[Tensor, "h 2"]]:
    """Within each fold, whose scores are of one classifier; folds count by their tokens."""
    heads, clusters = len(scores), int(cluster.max()) + 1
    area = scores.new_zeros(heads)
    influence = scores.new_zeros(heads, clusters)
    folds = int(fold.max()) + 1
    for i in range(folds):
        mine = fold == i
        share = float(mine.sum()) / len(mine)
        queries, keys = scores[:, mine & is_query], scores[:, mine & ~is_query]
        above = placed(queries, keys)  # (h, queries): share of keys below each query
        below = 1 - placed(keys, queries)  # (h, keys): share of queries above each key
        here = above.mean(-1)
        area += share * here
        for part, side in ((above, mine & is_query), (below, mine & ~is_query)):
            influence.index_add_(1, cluster[side], share * (part - here[:, None]) / part.shape[1])
    spread = influence.square().sum(-1) * clusters / (clusters - 1) * (1 + folds / (folds - 1))
    inside = (area > 0) & (area < 1)
    safe = torch.where(inside, area, 0.5)
    margin = WIDTH * spread.sqrt() / (safe * (1 - safe))
    ends = torch.stack([(torch.logit(safe) + sign * margin).sigmoid() for sign in (-1, 1)], -1)
    return area, torch.where(inside[:, None], ends, area[:, None])


def placed(one: Float[Tensor, "h n"], others: Float[Tensor, "h m"]) -> Float[Tensor, "h n"]:
    """The share of the others below each one; equal ones count half."""
    line = others.sort(-1).values
    one = one.contiguous()
    lower, upper = torch.searchsorted(line, one), torch.searchsorted(line, one, right=True)
    return (lower + upper).double() / (2 * others.shape[-1])
