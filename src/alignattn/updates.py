"""Whether the model has been updated: the adversary steps when the model does, once for all batches of one update.

torch tells of every optimizer's step. Updates by hand show in the weights, which were written to, and in the
gradients, which are gone or others.
"""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
)

LOOK_AGAIN = 10  # steps of another model's optimizer, after which it is asked anew what it updates

_watches: "weakref.WeakSet[Updates]" = weakref.WeakSet()
_handle: Any = None


class Updates:
    """Calls `then` when an optimizer has updated the model. Asked before each training forward for other updates."""

    def __init__(self, then: Callable[[], None], model: nn.Module | None = None) -> None:
        self.then = then
        self.model = weakref.ref(model) if isinstance(model, nn.Module) else None
        self.optimizers_seen = False
        self.versions: tuple[int, ...] | None = None
        self.written = False  # when last asked: weights surely were others than before
        self.gradients: list[weakref.ref[Tensor]] = []
        self._known: weakref.ref[Tensor] | None = None  # a weight of the model that optimizers update
        self._strangers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()  # and their steps
        _listen(self)

    def happened(self) -> bool:
        """Whether the model was updated since this was last asked, by hand; True where it cannot be known."""
        if self.optimizers_seen:
            return False
        parameters = list(self._parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        # While batches are accumulated, weights are not written to and gradients stay the tensors that they are.
        before = self.versions
        self.remember()
        self.written = before is not None and before != self.versions
        begun_anew = any(all(old() is not g for g in gradients) for old in self.gradients)
        self.gradients = [weakref.ref(g) for g in gradients[:1]]
        return before is None or self.written or begun_anew or not gradients

    def remember(self) -> None:
        """Weights as they are now are not news."""
        self.versions = tuple(p._version for p in self._parameters())

    def stepped(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped, of this model or another; without a model, any counts but an adversary's."""
        if getattr(optimizer, "is_adversary", False):
            return
        if self.model is None or self._updates(optimizer):
            self.optimizers_seen = True
            self.then()

    def _updates(self, optimizer: Optimizer) -> bool:
        """Whether a weight of the model is among its own. To look through all of a model's takes a while."""
        steps = self._strangers.get(optimizer, 0)
        if steps % LOOK_AGAIN:
            self._strangers[optimizer] = steps + 1
            return False
        known = None if self._known is None else self._known()
        if known is not None and known.requires_grad and any(p is known for p in _all_of(optimizer)):
            return True
        ours = {id(parameter) for parameter in self._parameters()}
        found = next((p for p in _all_of(optimizer) if id(p) in ours), None)
        if found is None:
            self._strangers[optimizer] = steps + 1
            return False
        self._known = weakref.ref(found)
        return True

    def _parameters(self) -> Iterator[nn.Parameter]:
        model = None if self.model is None else self.model()
        return iter(()) if model is None else (p for p in model.parameters() if p.requires_grad)


def _all_of(optimizer: Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _listen(watch: Updates) -> None:
    """One hook for all of torch's optimizers, from the first watch on."""
    global _handle  # noqa: PLW0603  # torch's hook is as global
    _watches.add(watch)
    if _handle is None:
        _handle = register_optimizer_step_post_hook(_tell)


def others_listen() -> bool:
    """Whether somebody else asked torch to be told of every optimizer's step."""
    ours = 0 if _handle is None else 1
    return bool(_global_optimizer_pre_hooks) or len(_global_optimizer_post_hooks) > ours


def _tell(optimizer: Optimizer, *_: Any) -> None:
    for watch in list(_watches):
        watch.stepped(optimizer)
