"""What sockets have in common that follow a module while it runs, and find its queries and keys on the way."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from torch import nn
from torch.utils.hooks import RemovableHandle

from alignattn.capture.site import ProjectedSocket, Site

if TYPE_CHECKING:
    from alignattn.capture.tap import Tap


class OneCall(Protocol):
    """One call of one module, entered when it begins and left when it is over."""

    module: Any

    def __enter__(self) -> Any: ...

    def __exit__(self, kind: object, error: object, trace: object, /) -> Any: ...


Followed = TypeVar("Followed", bound=OneCall)


class CallSocket(ProjectedSocket, Generic[Followed]):
    """Follows the calls of its modules, one within the other, and hooks a module anew when its children are others."""

    def __init__(self, tap: "Tap", sites: Sequence[Site]) -> None:
        super().__init__(tap, sites)
        self.running: list[Followed] = []
        self.watched: dict[nn.Module, list[RemovableHandle]] = {}

    def hooks(self, module: nn.Module) -> list[RemovableHandle]:
        """Those that depend on the children of a module, put in place."""
        raise TypeError(f"{type(self).__name__} must define hooks().")

    def watch(self, module: nn.Module) -> None:
        """Put its hooks in place, in the place of those that were."""
        for handle in self.watched.pop(module, ()):
            handle.remove()
        self.watched[module] = self.hooks(module)

    def rehook(self, module: nn.Module) -> None:
        super().rehook(module)
        self.watch(module)

    def begin(self, call: Followed) -> None:
        """A module runs that is to be recorded."""
        self.called(call.module)
        self.running.append(call)
        call.__enter__()

    def running_call(self, module: nn.Module) -> Followed | None:
        """The call that is under way, if it is of this module."""
        return self.running[-1] if self.running and self.running[-1].module is module else None

    def end(self, module: nn.Module, _args: tuple[Any, ...], _output: Any) -> None:
        """A hook: a module has run, or failed."""
        if self.running_call(module) is not None:
            self.running.pop().__exit__(None, None, None)

    def close(self) -> None:
        super().close()
        while self.running:
            self.running.pop().__exit__(None, None, None)

    def remove(self) -> None:
        super().remove()
        for handles in self.watched.values():
            for handle in handles:
                handle.remove()
        self.watched.clear()
