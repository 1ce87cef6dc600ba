"""What torch.compile is told of hooks. By default it looks at none: neither when they come, nor whose they are."""

from typing import ClassVar

import torch


class CompiledHooks:
    """Has compiled code go by the hooks of a model, while it has some of ours.

    What was compiled before would go on without hooks that come later. And compiled code does not know one model of a
    class from another: what was made of a plain one would be run for one with hooks. So what is compiled from now on
    asks which hooks a module has.
    """

    _models: ClassVar[int] = 0  # that have any
    _skipped: ClassVar[bool] = True  # torch's own setting, as it was before the first

    def __init__(self) -> None:
        self._there = False

    def come(self) -> None:
        """Hooks are put in place."""
        import torch._dynamo

        kind = type(self)
        if kind._models == 0:
            kind._skipped = torch._dynamo.config.skip_nnmodule_hook_guards
            torch._dynamo.config.skip_nnmodule_hook_guards = False
        kind._models += 1
        self._there = True
        torch.compiler.reset()

    def go(self) -> None:
        """They have been taken away, if there were any."""
        if not self._there:
            return
        kind = type(self)
        kind._models -= 1
        if kind._models == 0:
            torch._dynamo.config.skip_nnmodule_hook_guards = kind._skipped
        self._there = False
        torch.compiler.reset()
