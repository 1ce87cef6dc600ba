"""Any other model that calls torch.nn.functional.scaled_dot_product_attention.

Modules are found by their code: those whose functions name it, directly or through functions of their own files.
While a forward pass is recorded a function mode sees each call, and the module that is just running gives it its
name.
"""

import inspect
import types
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from alignattn.capture.attending import Attending
from alignattn.capture.hook import Hook
from alignattn.capture.querykey import AttentionCall, as_bias, causal_bias, valid_keys
from alignattn.capture.site import HEADS, WIDTH, ProjectedSocket, Site, attends_elsewhere, first_integer

if TYPE_CHECKING:
    from alignattn.capture.tap import Tap

SDPA = torch.nn.functional.scaled_dot_product_attention
LIBRARIES = ("torch", "transformers", "torch_geometric", "accelerate", "peft", "alignattn", "builtins")


class SdpaSocket(ProjectedSocket):
    """Sees the calls of scaled_dot_product_attention through a function mode."""

    kind = "scaled_dot_product_attention"

    @classmethod
    def find(cls, model: nn.Module) -> list[Site]:
        known: dict[type, bool] = {}
        sites = []
        for name, module in model.named_modules():
            if type(module) not in known:
                known[type(module)] = not _of_library(type(module)) and _class_calls(type(module))
            if known[type(module)] or any(value is SDPA for value in vars(module).values()):
                sites.append(Site(name, module, cls.kind, first_integer(module, HEADS), first_integer(module, WIDTH)))
        return sites

    def __init__(self, tap: "Tap", sites: Sequence[Site]) -> None:
        super().__init__(tap, sites)
        self.running: list[nn.Module] = []
        self.mode: _SeeAttention | None = None
        self.paused = False
        self.recomputing = False
        for module in self.sites:
            names = list(inspect.signature(module.forward).parameters)
            self.handles.append(module.register_forward_pre_hook(Hook(self._enter(names)), with_kwargs=True))
            self.handles.append(module.register_forward_hook(Hook(self._leave), always_call=True))

    def open(self) -> None:
        super().open()
        self.running.clear()
        self.mode = _SeeAttention(self)
        self.mode.__enter__()

    def close(self) -> None:
        super().close()
        if self.mode is not None:
            self.mode.__exit__(None, None, None)
            self.mode = None
            self.recomputing = False

    def _enter(self, names: list[str]) -> Any:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.mode is None and (self.tap.attend is not None or self.tap.recomputes(module)):
                self.open()  # a checkpointed layer is recomputed in the backward pass, and as it was computed
                self.recomputing = True
            if self.mode is not None:
                self.running.append(module)
                if self.tap.records_from(module):
                    self.called(module)
                self.cross[module] = attends_elsewhere(names, args, kwargs)

        return before

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.running and self.running[-1] is module:
            self.running.pop()
        if self.recomputing and not self.running:
            self.close()

    def sees(self, function: Any) -> bool:
        """Whether this is a call of a watched module."""
        return function is SDPA and len(self.running) > 0 and not self.paused

    def see(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        **_: Any,
    ) -> None:
        """One call, to be recorded."""
        module = self.running[-1]
        for around in self.running:  # a module that holds another which attends has been seen with it
            self.silent.pop(around, None)
        if self.tap.records_from(module):
            lead = query.shape[:-3]
            queries, keys = _four(query, lead), _four(key, lead)
            mask = _four_mask(attn_mask, query)
            key_mask = valid_keys(mask, keys.shape[0], keys.shape[2])
            attending = None
            if self.tap.attending:
                bias = causal_bias(queries, keys) if is_causal else as_bias(mask, query)
                attending = Attending(query.shape[-1] ** -0.5 if scale is None else scale, bias)
            self.record(module, queries, keys, key_mask, cross=self._is_cross(query, key), attending=attending)

    def replaces(self, query: Tensor, key: Tensor, *_: Any, **__: Any) -> bool:
        """Whether the tap's own attention is to compute this call."""
        return self.tap.attend is not None and (self.tap.cross or not self._is_cross(query, key))

    def replace(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """The output of the tap's own attention."""
        assert self.tap.attend is not None
        lead = query.shape[:-3]
        heads = [_four(t, lead) for t in (query, key, value)]
        bias = causal_bias(heads[0], heads[1]) if is_causal else as_bias(_four_mask(attn_mask, query), query)

        def proceed() -> Tensor:
            with torch._C.DisableTorchFunction():
                return _four(
                    SDPA(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa), lead
                )

        call = AttentionCall(
            module=self.running[-1],
            query=heads[0],
            key=heads[1],
            value=heads[2],
            scale=query.shape[-1] ** -0.5 if scale is None else scale,
            bias=bias,
            dropout=dropout_p,
            proceed=proceed,
        )
        return self.tap.attend(call).reshape(*query.shape[:-1], value.shape[-1])

    def _is_cross(self, query: Tensor, key: Tensor) -> bool:
        return self.cross[self.running[-1]] or query.shape[-2] > key.shape[-2]


class _SeeAttention(TorchFunctionMode):
    def __init__(self, socket: SdpaSocket) -> None:
        super().__init__()
        self.socket = socket

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.unflatten and torch.compiler.is_compiling():
            # Under a function mode dynamo meets this method's Python, and cannot trace its super().
            return torch.ops.aten.unflatten.int(*args, **kwargs)
        if not self.socket.sees(func):
            return func(*args, **kwargs)
        self.socket.see(*args, **kwargs)
        if not self.socket.replaces(*args, **kwargs):
            return func(*args, **kwargs)
        # Taps that were there before see the call all the same, and not what the stand-in may call.
        others = [m.socket for m in _get_current_function_mode_stack() if isinstance(m, _SeeAttention)]
        others = [socket for socket in others if socket.sees(func)]
        for socket in others:
            socket.see(*args, **kwargs)
            socket.paused = True
        try:
            return self.socket.replace(*args, **kwargs)
        finally:
            for socket in others:
                socket.paused = False


def _four(tokens: Tensor, lead: Sequence[int]) -> Tensor:
    """[b, h, n, d]; without a head axis the tokens have one head, and several leading axes are samples."""
    if tokens.ndim < 4:
        return tokens[:, None] if tokens.ndim == 3 else tokens[None, None]
    return tokens.flatten(0, len(lead) - 1) if len(lead) > 1 else tokens


def _four_mask(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """A mask that broadcasts to the logits of these queries, as one that broadcasts to [b, h, n, m]."""
    lead = query.shape[:-3]
    if mask is None or mask.ndim <= 3 < query.ndim:
        return mask
    if query.ndim < 4:
        return mask[:, None] if mask.ndim == 3 else mask
    return mask.expand(*lead, *mask.shape[-3:]).flatten(0, len(lead) - 1)


# --- finding modules by their code ---------------------------------------------------------------------------------


def _of_library(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "") or "").split(".")[0] in LIBRARIES


def _class_calls(cls: type) -> bool:
    return any(
        _calls(function, depth=3)
        for base in cls.__mro__
        if not _of_library(base)
        for function in vars(base).values()
        if callable(function)
    )


def _calls(function: Any, depth: int) -> bool:
    """Whether the code of a function reaches scaled_dot_product_attention, through its own helpers at most."""
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    if code is None:
        return function is SDPA
    names = set(_names(code))
    if "scaled_dot_product_attention" in names:
        return True
    reached = [function.__globals__.get(name) for name in names]
    reached += [cell.cell_contents for cell in function.__closure__ or () if _filled(cell)]
    with warnings.catch_warnings():  # of names that a library is to drop
        warnings.simplefilter("ignore")
        reached += [getattr(m, name, None) for m in reached if isinstance(m, types.ModuleType) for name in names]
    if any(thing is SDPA for thing in reached):
        return True
    helpers = (thing for thing in reached if isinstance(thing, types.FunctionType) and not _of_library(thing))
    return depth > 0 and any(_calls(helper, depth - 1) for helper in helpers)


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
