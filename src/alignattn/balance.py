"""Alignment's gradient beside the task's, where both meet: at the queries and keys.

    share = weight · |gradient of alignment| / |gradient of the task|,    norms over all queries and keys of an update

Where all that is matched are copies (nn.MultiheadAttention), the two meet in the weights of their projections, and
the norms are over those. Looked at in every tenth update, by hooks on the tensors themselves, without waiting for the
device. It tells whether alignment does nothing or eats the task; and with `weight="auto"` a target bounds it, so that
one setting serves models of any size: the fair weight is target · |task| / |alignment|, smoothed, and the same in all
processes. In the beginning the weight is that; later it falls with it and never rises. Keys and queries that come
together have small gradients, and the task's own grow in fine-tuning, on MRPC by fifty times: a weight that made up for
either grew without end, on SNLI to millions, and took the task with it.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from alignattn.capture import Source
from alignattn.capture.hook import is_compiled_output
from alignattn.errors import ConfigError
from alignattn.processes import several

EVERY = 10  # updates
BEGINNING = 30  # updates, in which the chosen weight may also rise
# Of the logarithm of the fair weight, from one look to the next. Longer where a weight that only falls would follow
# every dip of the noise.
MEMORY, LATER_MEMORY = 0.7, 0.9
STATE = ("weight", "fair_weight")


Weight = float | Tensor  # a tensor where it changes and must neither be waited for nor be compiled for
Meet = Callable[[Tensor, Weight, Source | None], None]  # told alignment's gradient, without its weight


class Balance:
    """Gathers both gradients in an update that is looked at; `weight` is what `auto` has chosen."""

    def __init__(self, target: float | None = None, first_weight: float = 0.0) -> None:
        self.target = target
        self.first_weight = first_weight  # zero: before the first look alignment only watches
        self.weight = torch.full((), first_weight, device="cpu")
        self.fair_weight = self.weight  # that would give alignment its share now, smoothed both ways
        self.is_blind = False  # the weight is to be chosen, and the gradients that tell it are hidden in compiled code
        self.at_weights = False  # of projections: there are no queries and keys that the task's gradient goes through
        self.paused = False  # gradients that come by are on their way to projections, and not the task's
        self._watches = False  # anything in the update under way
        self._squares: Tensor | None = None  # [2]: of alignment's gradient without its weight, of the task's
        # What alignment has given to some rows of a weight in the backward under way, and the hook that waits there.
        self._meetings: dict[tuple[int, int], list[tuple[Tensor, Weight]]] = {}
        self._handles: list[RemovableHandle] = []

    def watch(
        self,
        tokens: Tensor,
        source: Source | None,
        gradient: Tensor,
        weight: Weight,
        *,
        scale: float,
        through: bool,
    ) -> Callable[[Tensor], None] | None:
        """Alignment's gradient of these tokens is known, times `scale`; `through`: it also goes through them, weighed.

        What is returned must be called when it is handed on, with the factor that the whole loss got on the way: a
        scaler's, say. What alignment in later layers does to these tokens, through what they give to them, counts as
        the task's.
        """
        meet = self.expect(tokens, source, through=through)
        if meet is None:
            return None

        def tell(factor: Tensor) -> None:
            """In fp16 it vanishes without the scale and a scaler's factor."""
            meet(at_least_single(gradient) * (factor / scale).to(gradient.device), weight, source)

        return tell

    def expect(self, tokens: Tensor, source: Source | None, *, through: bool) -> Meet | None:
        """Alignment's gradient of these tokens will be known when it is handed on; None: it need not be told.

        What is returned must then be called with it, its weight, and where copies came from. Of tokens and source
        nothing is kept until then: who computes them again in the backward keeps none either.
        """
        if not tokens.requires_grad or (source is not None) != self.at_weights:
            return None
        if is_compiled_output(tokens):  # the task's gradient does not come by there
            if self.target is not None:
                self.weight = torch.full((), self.unseen(), device="cpu")
            return None
        self._watches = True
        if source is not None:
            met = self._meeting(source.weight, source.start)

            def at_weights(gradient: Tensor, weight: Weight, of: Source | None) -> None:
                assert of is not None
                met.append((of.gradient(gradient), weight))

            return at_weights
        if not through:
            nothing = torch.zeros((), device=tokens.device)

            def of_task(total: Tensor | None) -> None:
                if total is not None and not self.paused:
                    self._add(nothing, _square(total))

            tokens.register_hook(of_task)
            return lambda gradient, *_: self._add(_square(gradient), nothing)
        own: list[tuple[Tensor, Weight]] = []

        def both(total: Tensor | None) -> None:
            if own and total is not None:
                aligned, weight = own.pop()
                self._add(_square(aligned), _square(total - aligned * weight))

        tokens.register_hook(both)
        return lambda gradient, weight, _: own.append((gradient, weight))

    def _meeting(self, weights: Tensor, start: int) -> list[tuple[Tensor, Weight]]:
        """Where to put what alignment gives to some rows of a weight, before they get their whole gradient.

        One for all calls that share a weight: the task's gradient comes once, and alignment's parts add up.
        """
        key = id(weights), start
        if key not in self._meetings:
            parts = self._meetings[key] = []

            def both(total: Tensor | None) -> None:
                if parts and total is not None:
                    weight = parts[0][1]
                    gradient = torch.stack([part for part, _ in parts]).sum(0)
                    parts.clear()
                    total = total[start : start + len(gradient)].float()
                    self._add(_square(gradient), _square(total - gradient * weight))

            if weights.requires_grad:
                self._handles.append(weights.register_hook(both))
        return self._meetings[key]

    def unseen(self) -> float:
        """The weight of compiled code, whose gradients nobody sees."""
        if not self.first_weight:
            raise ConfigError(COMPILED)
        self.is_blind = True
        return self.first_weight

    def forget(self) -> None:
        """Leave nothing behind, on parameters least of all."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._meetings.clear()
        self._squares, self._watches = None, False

    @torch.no_grad()
    def _add(self, aligned: Tensor, task: Tensor) -> None:
        squares = torch.stack([aligned, task])
        self._squares = squares if self._squares is None else self._squares + squares.to(self._squares.device)

    @torch.no_grad()
    def settle(self, weight: Weight, updates: int, *, device: torch.device | None) -> Tensor | None:
        """An update that was looked at is over, after so many others: the share that alignment had.

        Every process must call this together.
        """
        squares, watched = self._squares, self._watches
        self.forget()
        if several():
            squares = torch.zeros(2, device=device) if squares is None else squares
            dist.all_reduce(squares)
        if squares is None:
            return None
        ratio = (squares[1] / squares[0]).sqrt()  # of the task's gradient to alignment's
        usable = ratio.isfinite() & (ratio > 0)
        if self.target is not None and not self.is_blind:
            self._choose(self.target * ratio, updates, usable)
        if not watched:
            return None
        share = torch.as_tensor(weight, device=squares.device) * (squares[0] / squares[1]).sqrt()
        return torch.where(share.isfinite(), share, torch.nan)  # zero is a share: every head may be left alone

    def _choose(self, fair: Tensor, updates: int, usable: Tensor) -> None:
        """The weight after so many updates, in the last of which this one would have been fair."""
        weight, before = self.weight.to(fair), self.fair_weight.to(fair)
        begins = updates < BEGINNING
        memory = (MEMORY if begins else LATER_MEMORY) if updates else 0.0
        fair = torch.where(before > 0, before**memory * fair ** (1 - memory), fair)
        chosen = fair if begins else torch.where(weight > 0, torch.minimum(weight, fair), fair)
        self.fair_weight = torch.where(usable, fair, before)
        self.weight = torch.where(usable, chosen, weight)

    def state_dict(self) -> dict[str, float]:
        """What was chosen so far, to continue from; nothing where nothing is chosen."""
        return {} if self.target is None else {name: float(getattr(self, name)) for name in STATE}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from what state_dict() gave, among other things."""
        if self.target is not None and "weight" in saved:
            self.weight = torch.tensor(float(saved["weight"]))
            self.fair_weight = torch.tensor(float(saved.get("fair_weight", saved["weight"])))


def at_least_single(gradient: Tensor) -> Tensor:
    """Half precision as single: a gradient scaler's factor alone may be more than fp16 can hold."""
    return gradient.to(torch.promote_types(gradient.dtype, torch.float32))


@torch.no_grad()
def _square(gradient: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32))
    return norm.float().square()


COMPILED = (
    "weight='auto' looks at gradients inside the backward pass, which compiled code does not show. Give a number: "
    "without torch.compile, auto's choice stands in the logs as alignment_weight."
)
