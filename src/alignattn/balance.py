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
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from alignattn.capture import Source
from alignattn.capture.hook import is_compiled_backward, is_compiled_output
from alignattn.errors import ConfigError
from alignattn.processes import several

EVERY = 10  # updates
# Numbers in gradients that are measured together: more would show in what a step needs. A CPU gains nothing by it.
MANY, AT_ONCE = 3 * 2**22, {"cpu": 0}
BEGINNING = 30  # updates, in which the chosen weight may also rise
# Of the logarithm of the fair weight, from one look to the next. Longer where a weight that only falls would follow
# every dip of the noise.
MEMORY, LATER_MEMORY = 0.7, 0.9
STATE = ("weight", "fair_weight")


Weight = float | Tensor  # a tensor where it changes and must neither be waited for nor be compiled for
Meet = Callable[[Tensor, Weight, Source | None], None]  # told alignment's gradient, without its weight
# Told its norm, without its weight, and the gradient as it is handed on, where it goes through the tokens themselves.
MeetHanded = Callable[[Tensor, Tensor | None], None]


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
        # Norms of parts of either, since the last backward: added up together, as a device waits for Python.
        self._aligned: list[Tensor] = []
        self._task: list[Tensor] = []
        # Gradients in the backward under way that are still to be measured, each with what alignment gave to it.
        self._arrived: list[tuple[Tensor, Tensor | None]] = []
        # What alignment has given to some rows of a weight in the backward under way, and the hook that waits there.
        self._meetings: dict[tuple[int, int], list[tuple[Tensor, Weight]]] = {}
        self._handles: list[RemovableHandle] = []

    def expect(self, tokens: Tensor, source: Source | None, *, through: bool) -> Meet | None:
        """Alignment's gradient of these tokens will be known when it is handed on; None: it need not be told.

        What is returned must then be called with it, its weight, and where copies came from. Of tokens and source
        nothing is kept until then: who computes them again in the backward keeps none either. What alignment in later
        layers does to these tokens, through what they give to them, counts as the task's.
        """
        if source is None:
            meet = self.expect_handed(tokens, through=through)
            return None if meet is None else lambda gradient, weight, _: meet(_norm(gradient), gradient * weight)
        if not self._sees(tokens, at_weights=True):
            return None
        met = self._meeting(source.weight, source.start)

        def at_weights(gradient: Tensor, weight: Weight, of: Source | None) -> None:
            assert of is not None
            met.append((of.gradient(gradient), weight))

        return at_weights

    def expect_handed(self, tokens: Tensor, *, through: bool) -> MeetHanded | None:
        """The same, of tokens that are no copies; `through`: alignment's gradient goes through them, weighed."""
        if not self._sees(tokens, at_weights=False):
            return None
        if not through:

            def of_task(total: Tensor | None) -> None:
                if total is not None and not self.paused:
                    self._measure_soon(total, None)

            tokens.register_hook(of_task)
            return lambda norm, _: self._aligned.append(norm)
        own: list[tuple[Tensor, Tensor | None]] = []

        def both(total: Tensor | None) -> None:
            if own and total is not None:
                norm, handed = own.pop()
                self._aligned.append(norm)
                self._measure_soon(total, handed)

        tokens.register_hook(both)
        return lambda norm, handed: own.append((norm, handed))

    @torch.no_grad()
    def _measure_soon(self, total: Tensor, handed: Tensor | None) -> None:
        """The task's part of a gradient: with others at once, as devices wait for Python, within this backward."""
        many = AT_ONCE.get(total.device.type, MANY)
        if not many or is_compiled_backward():
            self._task.append(_norm(total, without=handed))
            return
        self._arrived.append((total, handed))
        if sum(one.numel() for one, _ in self._arrived) >= many:
            self._measure_arrived()
        elif len(self._arrived) == 1:
            Variable._execution_engine.queue_callback(self._measure_arrived)

    @torch.no_grad()
    def _measure_arrived(self) -> None:
        arrived, self._arrived = self._arrived, []  # at once: each accelerator's backward has a thread of its own
        kinds: dict[Any, list[tuple[Tensor, Tensor | None]]] = {}
        for total, handed in arrived:
            kinds.setdefault((total.device, total.dtype, handed is None), []).append((total, handed))
        for some in kinds.values():
            left, without = [total for total, _ in some], [handed for _, handed in some if handed is not None]
            left = list(torch._foreach_sub(left, without)) if without else left
            self._task += torch._foreach_norm(left, 2, dtype=_summed_in(left[0]))

    def _sees(self, tokens: Tensor, *, at_weights: bool) -> bool:
        """Whether both gradients come by at these tokens, or at the weights that copies were made with."""
        if not tokens.requires_grad or at_weights != self.at_weights:
            return False
        if is_compiled_output(tokens):  # the task's gradient does not come by there
            if self.target is not None:
                self.weight = torch.full((), self.unseen(), device="cpu")
            return False
        self._add_up()  # what a backward before this forward has left
        self._watches = True
        return True

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
                    self._aligned.append(_norm(gradient))
                    self._task.append(_norm(total, without=gradient * weight))

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
        self._aligned.clear()
        self._task.clear()
        self._arrived.clear()
        self._squares, self._watches = None, False

    @torch.no_grad()
    def _add_up(self) -> None:
        """The squares of all norms so far."""
        norms, count = [*self._aligned, *self._task], len(self._aligned)
        if not norms:
            return
        self._aligned.clear()
        self._task.clear()
        device = norms[0].device if self._squares is None else self._squares.device
        squares = torch.stack([norm.to(device) for norm in norms]).float().square()
        both = torch.stack([squares[:count].sum(), squares[count:].sum()])
        self._squares = both if self._squares is None else self._squares + both

    @torch.no_grad()
    def settle(self, weight: Weight, updates: int, *, device: torch.device | None) -> Tensor | None:
        """An update that was looked at is over, after so many others: the share that alignment had.

        Every process must call this together.
        """
        self._add_up()
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


@torch.no_grad()
def _norm(gradient: Tensor, without: Tensor | None = None) -> Tensor:
    """Of a gradient, or of what is left of it without another; summed in single precision at least."""
    left = gradient if without is None else gradient - without
    norm: Tensor = torch.linalg.vector_norm(left, dtype=_summed_in(left))
    return norm


@torch.no_grad()
def norms(gradients: Tensor) -> Tensor:
    """Of each of many, [l, ...]; all at once."""
    each = tuple(range(1, gradients.ndim))
    found: Tensor = torch.linalg.vector_norm(gradients, dim=each, dtype=_summed_in(gradients))
    return found


def _summed_in(gradient: Tensor) -> torch.dtype:
    return torch.float64 if gradient.dtype == torch.float64 else torch.float32


COMPILED = (
    "weight='auto' looks at gradients inside the backward pass, which compiled code does not show. Give a number: "
    "without torch.compile, auto's choice stands in the logs as alignment_weight."
)
