"""Fewer tokens and fewer layers a step, drawn at random: options that trade precision of the estimate for time.

Tokens: at most so many of a sample, each as likely as any other; the same ones of queries and keys, where both are of
one sequence. Layers: one in so many, counted with that factor, so that on average the loss and its gradient are those
of all layers. In updates that are looked at (strength.py) every layer is matched, for the figures in the logs.

What is drawn is told by the seed, the count of updates, and that of losses in an update: a run that is resumed between
two updates draws as it would have. Torch's own generators are left alone.
"""

import random
from dataclasses import replace

import torch
from torch import Tensor

from alignattn.capture import QueryKey

Places = tuple[Tensor | None, Tensor | None]  # of queries and of keys, [b, tokens]; None: all


class Thinning:
    """Draws what is matched."""

    def __init__(self, max_tokens: int | None, every: int, seed: int) -> None:
        self.max_tokens = max_tokens
        self.every = every
        self._seed = seed
        self._update = self._losses = -1  # of the loss that is taken: how many updates, and losses in this one, before
        self._chance = random.Random()
        self._number = 0  # seeds torch's generators
        self._generators: dict[torch.device, torch.Generator] = {}

    def begin(self, update: int, *, again: bool = False) -> None:
        """A loss is taken, after so many updates; `again`: the last one is computed once more."""
        if self.max_tokens is None and self.every == 1:
            return
        if not again:
            self._losses = self._losses + 1 if update == self._update else 0
        self._update = update
        self._chance.seed(f"{self._seed} {update} {self._losses}")
        self._number = self._chance.getrandbits(62)
        for generator in self._generators.values():
            generator.manual_seed(self._number)

    def forget(self) -> None:
        """The clock was set: the next loss is the first of its update."""
        self._update = self._losses = -1

    def layers(self, counts: list[int]) -> tuple[list[bool], int]:
        """Which of the records are matched, `counts` of them in each forward pass; and how much each counts then."""
        every = min(self.every, *counts)
        first = self._chance.randrange(every) if every > 1 else 0
        return [place % every == first for count in counts for place in range(count)], every

    def tokens(self, row: QueryKey) -> QueryKey:
        """The same, with as many tokens as may be."""
        return thinned(row, self.places(row))

    def places(self, row: QueryKey) -> Places | None:
        """Those tokens, drawn; None: all."""
        most = self.max_tokens
        if most is None or max(row.query.shape[2], row.key.shape[2]) <= most:
            return None
        of_query = self._drawn(row.query, row.query_mask, most)
        together = row.query.shape[2] == row.key.shape[2] and _alike(row.query_mask, row.key_mask)
        return of_query, of_query if together else self._drawn(row.key, row.key_mask, most)

    def _drawn(self, tokens: Tensor, mask: Tensor | None, most: int) -> Tensor | None:
        """Places [b, most], in the order of the sequence; valid ones first where there are too few. None: all."""
        samples, _, length, _ = tokens.shape
        if length <= most:
            return None
        generator = self._generators.get(tokens.device)
        if generator is None:
            generator = self._generators[tokens.device] = torch.Generator(tokens.device)
            generator.manual_seed(self._number)
        chances = torch.rand(samples, length, device=tokens.device, generator=generator)
        if mask is not None:
            chances = chances.masked_fill(~mask, -1.0)
        return chances.topk(most, dim=1).indices.sort(1).values


def thinned(row: QueryKey, places: Places | None) -> QueryKey:
    """The same, with the tokens at these places."""
    if places is None:
        return row
    of_query, of_key = places
    return replace(
        row,
        query=_taken(row.query, of_query),
        key=_taken(row.key, of_key),
        query_mask=_taken_of_mask(row.query_mask, of_query),
        key_mask=_taken_of_mask(row.key_mask, of_key),
        query_output=None,
        key_output=None,
    )


def _alike(one: Tensor | None, other: Tensor | None) -> bool:
    """Masks of one sequence are made alike: to compare their numbers would make a device wait."""
    if one is None or other is None:
        return one is other
    return one is other or (one.data_ptr() == other.data_ptr() and one.shape == other.shape)


def _taken(tokens: Tensor, places: Tensor | None) -> Tensor:
    if places is None:
        return tokens
    index = places[:, None, :, None].expand(-1, tokens.shape[1], -1, tokens.shape[3])
    return tokens.gather(2, index)


def _taken_of_mask(mask: Tensor | None, places: Tensor | None) -> Tensor | None:
    return mask if mask is None or places is None else mask.gather(1, places)
