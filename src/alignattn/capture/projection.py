"""The projections that make queries and keys, and a way for a gradient to reach them and nothing before them.

With `generator="projections"` the alignment moves W_q and W_k alone. Recomputing q and k from a detached input would
cost another product for each. Instead the projection's output gets a *twin*: a tensor of the same shape that holds no
numbers, whose gradient g gives dW = gᵀx and db = sum g, and nothing to x. What lies between projection and attention
(reshaping, rotary, norms) is differentiated back from the captured q and k to the output, and the result handed to
the twin.
"""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from alignattn.capture.hook import Hook
from alignattn.capture.querykey import Projected
from alignattn.errors import UnsupportedModelError

PREFIX = r"^(w|to_|linear_|fc_|project_|projection_)?"
SEPARATE = re.compile(PREFIX + r"(q|k|query|key)(_?(proj|projection|lin|linear|layer|attn))?$", re.IGNORECASE)
FUSED = re.compile(r"^(w?qkv|w?qk|kv|c_attn|query_key_value|in_proj|att_proj)(_?(proj|lin|linear))?$", re.IGNORECASE)
NORM = re.compile(r"^(q|k|qk|query|key)_?(layer)?_?norm$|^norm_?(q|k)$", re.IGNORECASE)


def find_projections(module: nn.Module) -> list[tuple[str, nn.Module]] | None:
    """The children that make queries and keys and the norms behind them; None if they cannot be told by name."""
    children = [(name, child) for name, child in module.named_children() if any(True for _ in child.parameters())]
    makers = [(n, c) for n, c in children if SEPARATE.match(n) or FUSED.match(n)]
    fused = any(FUSED.match(n) and not n.lower().startswith("kv") for n, _ in makers)
    if not (fused or {side_of(n) for n, _ in makers} >= {"query", "key"}):
        return None
    return makers + [(n, c) for n, c in children if NORM.match(n)]


def side_of(name: str) -> str | None:
    """Whether a projection of this name makes "query" or "key"; None for a fused one and for anything else."""
    if FUSED.match(name) or not SEPARATE.match(name):
        return None
    return "query" if re.sub(PREFIX, "", name.lower()).startswith("q") else "key"


def frozen(module: nn.Module) -> bool:
    """Whether the projections are known and none of their parameters is trained."""
    found = find_projections(module)
    return found is not None and not any(p.requires_grad for _, child in found for p in child.parameters())


class _LinearTwin(torch.autograd.Function):
    """No numbers, only shape and gradient: dW = gᵀ x, db = sum g."""

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, tokens: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool
    ) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.transposed = transposed  # Conv1D of GPT-2 keeps its weight as [in, out]
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        return output.new_zeros(()).expand(output.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (tokens,) = ctx.saved_tensors
        gradient = gradients[0].flatten(0, -2)
        tokens = tokens.flatten(0, -2).to(gradient.dtype)
        weight = tokens.mT @ gradient if ctx.transposed else gradient.mT @ tokens
        bias = None if ctx.dtypes[1] is None else gradient.sum(0).to(ctx.dtypes[1])
        return None, None, weight.to(ctx.dtypes[0]), bias, None


class ProjectionHooks:
    """Watches the projections of one attention module and keeps what they put out, each with its twin."""

    def __init__(self, attention: nn.Module, children: list[tuple[str, nn.Module]], active: Callable[[], bool]) -> None:
        self.active = active
        self.outputs: list[Projected] = []
        self.handles = [attention.register_forward_pre_hook(Hook(self._called))]
        for name, child in children:
            if NORM.match(name):
                self.handles.append(child.register_forward_hook(Hook(self._norm)))
                continue
            if _draws(child):
                self.handles.append(child.register_forward_pre_hook(Hook(self._remember_random_state)))
            self.handles.append(child.register_forward_hook(Hook(self._projection)))

    def forget(self) -> None:
        """The forward pass is over."""
        self.outputs = []  # what the projections have put out since the attention module was called

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    # The twin is made whenever gradients flow, recorded or not: under checkpointing the recomputation must save the
    # same tensors as the first pass, though nobody listens to it.

    def _called(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.forget()

    def _projection(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        if not isinstance(output, Tensor):
            raise UnsupportedModelError(
                f"generator='projections' needs projections that put out one tensor, and {type(module).__name__} puts "
                f"out a {type(output).__name__}. Use generator='model'."
            )
        projected = Projected(output, self._twin(module, args[0].detach(), output))
        if self.active():
            self.outputs.append(projected)

    def _norm(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if self.active():
            self.outputs += [Projected(p, p) for p in module.parameters() if p.requires_grad]

    def _twin(self, module: nn.Module, tokens: Tensor, output: Tensor) -> Tensor:
        transposed = type(module).__name__ == "Conv1D"
        if type(module) is nn.Linear or transposed:
            bias: Tensor | None = module.bias  # type: ignore[assignment]
            twin: Tensor = _LinearTwin.apply(output, tokens, module.weight, bias, transposed)
            return twin
        if not _draws(module):
            return self._recomputed(module, tokens)
        with torch.random.fork_rng(devices=[tokens.device] if tokens.is_cuda else []):  # the same dropout as before
            torch.set_rng_state(self.random_state[0])
            if tokens.is_cuda:
                torch.cuda.set_rng_state(self.random_state[1], tokens.device)
            return self._recomputed(module, tokens)

    def _recomputed(self, module: nn.Module, tokens: Tensor) -> Tensor:
        output: Tensor = module.forward(tokens)
        return output

    def _remember_random_state(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        tokens: Tensor = args[0]
        state = torch.cuda.get_rng_state(tokens.device) if tokens.is_cuda else torch.empty(0)
        self.random_state = torch.get_rng_state(), state


def _draws(module: nn.Module) -> bool:
    return any(isinstance(m, nn.Dropout) and m.p > 0 for m in module.modules())
