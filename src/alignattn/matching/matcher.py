"""Matcher: from the queries and keys of many attention calls to one loss per problem, in one batched call.

A *problem* is one sample in one head of one attention call. Calls of one shape are stacked along `l`; their networks,
where the method has any, are rows of one bank of weights. A matcher knows tensors and layer names, never models.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from alignattn.errors import ConfigError, unknown
from alignattn.matching import kernels
from alignattn.matching.beside import parted, together
from alignattn.matching.networks import Rows
from alignattn.matching.scale import OnOneScale, on_one_scale
from alignattn.matching.scratch import Scratch
from alignattn.matching.tokens import blank_padding, full_precision

Edges = tuple[Tensor, Tensor]  # of a graph: places of queries, and of the keys they attend to

FINITE_INPUT = (
    1e9  # networks see entries clipped here: nothing is learnt from larger ones, and fp32 products stay finite
)


@dataclass(frozen=True, kw_only=True)
class MatcherConfig:
    """Options that every method has. Checked when made."""

    mask_padding: bool = True  # False counts padded tokens as tokens, as the released code does
    standardise: bool = False  # q and k on a common scale: minus their mean, over their deviation, in each problem

    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def __post_init__(self) -> None:
        for name, allowed in self.choices.items():
            if getattr(self, name) not in allowed:
                raise unknown(name, getattr(self, name), allowed)
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type in (bool, "bool") and not isinstance(value, bool):
                raise ConfigError(f"{field.name} must be True or False, got {value!r}.")


@dataclass(frozen=True, kw_only=True)
class NetworkConfig(MatcherConfig):
    """Options of the methods that learn networks."""

    hidden_width: int = 16  # of the perceptrons

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.hidden_width, int) or self.hidden_width < 1:
            raise ConfigError(
                f"hidden_width must be a whole number >= 1, got {self.hidden_width!r}. The default is 16."
            )


class Matcher(nn.Module):
    """Base of the four methods. Subclasses give `losses`, and `networks` if they have any.

    Queries, keys and the matcher's own parameters get gradients; whatever else a loss is computed with is a constant.
    Parameters are to be read where they are registered: a copy of the reference elsewhere is such a constant too.
    """

    separable: ClassVar[bool] = False  # see is_separable
    separable_by_heads: ClassVar[bool] = False
    replayable: ClassVar[bool] = False  # see is_replayable
    layered: ClassVar[bool] = False  # see rows_of

    def __init__(self, config: MatcherConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.seed = seed
        self.banks = nn.ModuleList()  # one ModuleDict of networks for each set of layers that appeared together
        self.rows: dict[tuple[str, int], tuple[int, int]] = {}  # (layer, head width) -> bank, row in it
        self._indices: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}
        self.asked = False  # for figures that logs show
        self._told: dict[str, list[tuple[Tensor, int]]] = {}
        self._learnt: list[nn.Parameter] | None = None
        self.scratch = Scratch()  # what pieces work in, on a CPU
        self.edges: Edges | None = None  # of the call that is being matched
        # Of each problem that was just brought onto one scale, one over the deviation [lb, h]: NaN where a token is.
        self.scales: Tensor | None = None
        self._brought: tuple[Tensor, Tensor, OnOneScale] | None = None  # while losses are made of these two
        self._narrowed = False  # to the layers of the call that is being matched
        self._given_up = False  # are its queries and keys, once they have been read
        self.products = kernels.EXACT  # how kernels make them, of the tokens that are being matched

    def networks(self, names: list[str], width: int) -> Mapping[str, nn.Module]:
        """The networks of these layers; none for methods without."""
        return {}

    def losses(
        self,
        query: Float[Tensor, "l b h n d"],
        key: Float[Tensor, "l b h m d"],
        query_mask: Bool[Tensor, "lb n"] | None,
        key_mask: Bool[Tensor, "lb m"] | None,
        names: list[str],
    ) -> Float[Tensor, "lb h"]:
        """One loss per problem; padded tokens are zeros already."""
        raise TypeError(f"{type(self).__name__} must define losses().")

    def ensure(self, names: list[str], width: int, device: torch.device) -> bool:
        """Make networks for the layers that have none yet; True if there were such."""
        new = [name for name in dict.fromkeys(names) if (name, width) not in self.rows]
        if not new:
            return False
        networks = self.networks(new, width)
        if networks:
            self.banks.append(nn.ModuleDict(dict(networks)).to("cpu" if device.type == "meta" else device))
            self._learnt = None
        self.rows |= {(name, width): (len(self.banks) - 1, row) for row, name in enumerate(new)}
        return bool(networks)

    def learnt(self) -> list[nn.Parameter]:
        """What `parameters()` gives, looked up once: they are made by `__init__`, or by `networks` when asked to."""
        if self._learnt is None:
            self._learnt = list(self.parameters())
        return self._learnt

    def _apply(self, *given: Any, **settings: Any) -> "Matcher":
        self._learnt = None  # torch may put others in their place
        super()._apply(*given, **settings)
        return self

    def is_separable(self) -> bool:
        """Whether samples and layers know nothing of each other, and may be matched apart.

        Said by `separable = True` in the class that defines `losses`: one that inherits it and does something else
        has not said so.
        """
        return self._says("separable")

    def is_separable_by_heads(self) -> bool:
        """Whether heads know nothing of each other either. Said by `separable_by_heads = True`, likewise."""
        return self._says("separable_by_heads")

    def is_replayable(self) -> bool:
        """Whether what is done to tensors of one shape is always the same, without asking the device or chance.

        Said by `replayable = True`, likewise.
        """
        return self._says("replayable")

    def leaves_nothing(self) -> bool:
        """Whether nothing that is computed on the way outlives a matching, and gradients are nobody else's.

        Said by `replayable = True`, likewise, whatever the options are.
        """
        return self._says("replayable")

    def follows_edges(self) -> bool:
        """Whether it matches along the edges of a graph (`edges`), one call at a time. Not unless a method does."""
        return False

    @contextmanager
    def along(self, edges: Edges | None) -> Iterator[None]:
        """What is matched within has these edges."""
        self.edges = edges
        try:
            yield
        finally:
            self.edges = None

    def rows_of(self, names: list[str], width: int) -> tuple[str, slice] | None:
        """Where the networks of these layers lie side by side: what their parameters' names begin with, and which rows.

        None where they don't, or are no rows. That all parameters of `networks` have an axis of layers first, and are
        reached by `network` or `through` alone, is said by `layered = True`, likewise.
        """
        if not self._says("layered"):
            return None
        places = [self.rows.get((name, width)) for name in names]
        if None in places or places[0] is None:
            return None
        bank, first = places[0]
        if places != [(bank, first + row) for row in range(len(places))]:
            return None
        return f"banks.{bank}.", slice(first, first + len(places))

    @contextmanager
    def narrowed(self, *, to_rows: bool) -> Iterator[None]:
        """Within, where it is so, networks hold the rows of the layers that are matched and no others."""
        self._narrowed = to_rows
        try:
            yield
        finally:
            self._narrowed = False

    @contextmanager
    def giving_up(self, *, tokens: bool) -> Iterator[None]:
        """Within, where it is so, nobody needs queries and keys but to be matched, once: gradients may lie there."""
        self._given_up = tokens and self.leaves_nothing()
        try:
            yield
        finally:
            self._given_up = False

    def _says(self, word: str) -> bool:
        for kind in type(self).__mro__:
            if own := {"losses", "forward", word} & vars(kind).keys():
                return word in own and bool(vars(kind)[word])
        return False

    def tell(self, name: str, value: Tensor, problems: int) -> None:
        """A figure for the logs, the mean over so many problems."""
        self._told.setdefault(name, []).append((value, problems))

    def taken_back(self, instead: Sequence[tuple[str, Tensor, int]] = ()) -> list[tuple[str, Tensor, int]]:
        """What was told since the last time, as it was told. Then nothing of it has been told, but this `instead`."""
        told, self._told = self._told, {}
        for one in instead:
            self.tell(*one)
        return [(name, value, count) for name, parts in told.items() for value, count in parts]

    def figures(self) -> dict[str, Tensor]:
        """What was told since the last time, over all problems."""
        told, self._told = self._told, {}
        return {
            name: sum((value.to(parts[0][0].device) * count for value, count in parts), start=torch.zeros(()))
            / sum(count for _, count in parts)
            for name, parts in told.items()
        }

    def counted(self, mask: Tensor | None) -> Tensor | None:
        """The mask, where padding is told from tokens at all."""
        return mask if self.config.mask_padding else None

    def bank(self, name: str, width: int) -> int:
        """Calls can be stacked only if their networks lie in one bank."""
        return self.rows[name, width][0]

    @full_precision
    def forward(
        self,
        query: Float[Tensor, "l b h n d"],
        key: Float[Tensor, "l b h m d"],
        query_mask: Bool[Tensor, "l b n"] | None,
        key_mask: Bool[Tensor, "l b m"] | None,
        names: list[str],
    ) -> Float[Tensor, "l b h"]:
        """One loss per problem, for `l` calls made by the layers `names`."""
        layers, samples = query.shape[:2]
        self.products = kernels.products_for(query.dtype, key.dtype)
        masks = [None if m is None else m.flatten(0, 1) for m in map(self.counted, (query_mask, key_mask))]
        masks[1] = masks[0] if key_mask is query_mask else masks[1]
        scaled = None
        if self.config.standardise:
            flat = query.flatten(0, 1), key.flatten(0, 1)
            scaled = on_one_scale(*flat, masks[0], masks[1], given_up=self._given_up)
            ready = [scaled.query, scaled.key]
        else:
            ready = [blank_padding(query.flatten(0, 1), masks[0]), blank_padding(key.flatten(0, 1), masks[1])]
        query, key = (t.unflatten(0, (layers, samples)) for t in ready)
        self.scales = None if scaled is None else scaled.inverse
        self._brought = None if scaled is None or scaled.way is None else (query, key, scaled)
        try:
            losses: Tensor = self.losses(query, key, masks[0], masks[1], names).unflatten(0, (layers, samples))
        finally:
            self._brought = None
        return losses

    def brought(self, query: Tensor, key: Tensor) -> OnOneScale | None:
        """How these were brought onto one scale by kernels: no others, though they be made of them."""
        if self._brought is None or self._brought[0] is not query or self._brought[1] is not key:
            return None
        return self._brought[2]

    def _rows_of(self, names: list[str], width: int, bank: int, device: torch.device) -> Rows:
        """Which rows of a bank serve these layers; None for all in order. Kept, as to copy it makes a device wait."""
        if self._narrowed:
            return None
        rows = tuple(self.rows[name, width][1] for name in names)
        if rows == tuple(range(sum(place == bank for place, _ in self.rows.values()))):
            return None
        if rows == tuple(range(rows[0], rows[0] + len(rows))):
            return slice(rows[0], rows[0] + len(rows))
        if (rows, device) not in self._indices:
            self._indices[rows, device] = torch.tensor(rows, device=device)
        return self._indices[rows, device]

    def through(
        self,
        network: str,
        names: list[str],
        query: Float[Tensor, "l b h n d"],
        key: Float[Tensor, "l b h m d"],
        *,
        around: Callable[[Tensor], Tensor] = lambda tensor: tensor,
        call: Callable[[Any, Tensor, Rows], Tensor] = lambda network, tokens, layers: network(tokens, layers),
    ) -> tuple[Float[Tensor, "lb h n e"], Float[Tensor, "lb h m e"]]:
        """Queries and keys through one network of each layer, in one product. `call` does what is asked of it."""
        tokens, called, layers = self.shown(network, names, query, key)
        return parted(around(call(called, around(tokens), layers)), query, key)

    def shown(
        self, network: str, names: list[str], query: Float[Tensor, "l b h n d"], key: Float[Tensor, "l b h m d"]
    ) -> tuple[Float[Tensor, "l t d"], Any, Rows]:
        """All tokens as a network is shown them, the network, and which of its layers."""
        tokens = together(query, key)  # (l, b*h*(n+m), d)
        if not self.config.standardise:  # which bounds them already
            tokens = tokens.clamp(-FINITE_INPUT, FINITE_INPUT)
        return tokens, *self.network(network, names, query)

    def network(self, network: str, names: list[str], query: Float[Tensor, "l b h n d"]) -> tuple[Any, Rows]:
        """The network, and which of its layers."""
        width = query.shape[-1]
        bank = self.bank(names[0], width)
        return self.banks[bank][network], self._rows_of(names, width, bank, query.device)  # type: ignore[index]
