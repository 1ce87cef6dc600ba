"""transformers models outside the attention interface, whose attention is written out: DeBERTa, MPNet, BLOOM, GPT-J ...

Projection hooks tell how many queries and keys a module makes. While it runs, a function mode looks for the product of
as many, which is q kᵀ as the module uses it, after rotary and norms; and at what goes into the softmax, where masked
keys stand out, whatever the mask was called and however it was given. A module may multiply more in one call (DeBERTa
does, for relative positions): the first such product is that of the tokens. Some scale queries or keys before it: where
they are a multiple of what the projection put out, the projection's output is taken.
"""

import inspect
import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from alignattn.capture.attending import Attending
from alignattn.capture.calls import CallSocket
from alignattn.capture.hook import Hook
from alignattn.capture.huggingface import head_width, uses_interface
from alignattn.capture.projection import FUSED, find_projections, side_of
from alignattn.capture.querykey import HIDDEN, as_bias, causal_bias, to_query_heads, valid_keys
from alignattn.capture.site import HEADS, Site, attends_elsewhere, first_integer

if TYPE_CHECKING:
    from alignattn.capture.tap import Tap


class HookedSocket(CallSocket["_SeeProducts"]):
    """Finds queries and keys where they are multiplied."""

    kind = "written-out attention"
    is_blind_to_shifts = False  # DeBERTa's keys also meet positions
    can_stand_in = False

    @classmethod
    def find(cls, model: nn.Module) -> list[Site]:
        if "transformers" not in sys.modules:
            return []
        return [
            Site(name, module, cls.kind, first_integer(module, HEADS), head_width(module))
            for name, module in model.named_modules()
            if type(module).__module__.startswith("transformers.") and _readable(module) and not uses_interface(module)
        ]

    def __init__(self, tap: "Tap", sites: Sequence[Site]) -> None:
        super().__init__(tap, sites)
        self.views: dict[tuple[nn.Module, str], View | None] = {}  # from a projection's output to heads, once known
        for module in self.sites:
            names = list(inspect.signature(module.forward).parameters)
            self.handles.append(module.register_forward_pre_hook(Hook(self._before(names)), with_kwargs=True))
            self.handles.append(module.register_forward_hook(Hook(self.end), always_call=True))
            self.watch(module)

    def hooks(self, module: nn.Module) -> list[RemovableHandle]:
        self.views = {key: view for key, view in self.views.items() if key[0] is not module}
        return [
            child.register_forward_hook(Hook(self._projected(module, name)))
            for name, child in find_projections(module) or ()
        ]

    def _before(self, names: list[str]) -> Callable[..., None]:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.tap.records_from(module):
                self.cross[module] = attends_elsewhere(names, args, kwargs)
                self.begin(_SeeProducts(self, module))

        return before

    def _projected(self, attention: nn.Module, name: str) -> Callable[..., None]:
        def after(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
            call = self.running_call(attention)
            if call is not None:
                call.projected(name, output if isinstance(output, Tensor) else output[0])

        return after

    def see(
        self, module: nn.Module, query: Tensor, key: Tensor, key_mask: Tensor | None, attending: Attending | None
    ) -> None:
        """One call of a watched module."""
        self.record(module, query, key, key_mask, cross=self.cross[module], attending=attending)


class _SeeProducts(TorchFunctionMode):
    """One call of one attention module."""

    def __init__(self, socket: HookedSocket, module: nn.Module) -> None:
        super().__init__()
        self.socket = socket
        self.module = module
        self.heads = socket.sites[module].heads or 1
        self.outputs: dict[str, list[Tensor]] = {"query": [], "key": [], "fused": []}
        self.pair: tuple[Tensor, Tensor] | None = None
        self.done = False

    def projected(self, name: str, output: Tensor) -> None:
        """One of its projections has run."""
        side = "fused" if FUSED.match(name) else side_of(name)
        if side is not None:
            self.outputs[side].append(output)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.done:
            name = getattr(func, "__name__", "")
            if name == "softmax":
                self._softmax(args[0] if args else kwargs["input"])
            elif name == "scaled_dot_product_attention":
                self._attention(*args, **kwargs)
            elif self.pair is None and name in PRODUCTS:
                operands = PRODUCTS[name](*args, **kwargs)
                self.pair = None if operands is None else self._queries_and_keys(*operands)
        return func(*args, **kwargs)

    def _softmax(self, logits: Tensor) -> None:
        if self.pair is None:
            return
        query, key = self.pair
        samples, heads, n, _ = query.shape
        if logits.numel() == samples * heads * n * key.shape[2] and logits.shape[-1] == key.shape[2]:
            highest = logits.detach().reshape(samples, heads * n, -1).amax(1)  # (b, m)
            self.done = True
            attending = None
            if self.socket.tap.attending:
                attending = Attending(logits=logits.detach().reshape(samples, heads, n, -1))
            self.socket.see(self.module, query, key, highest > HIDDEN, attending)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        _value: Tensor,
        attn_mask: Tensor | None = None,
        _dropout: float = 0.0,
        is_causal: bool = False,
        *_: Any,
        scale: float | None = None,
        **__: Any,
    ) -> None:
        pair = self._queries_and_keys(query, key)
        if pair is not None:
            self.done = True
            attending = None
            if self.socket.tap.attending:  # the operands themselves: of the pair, one may be a multiple
                bias = causal_bias(query, key) if is_causal else as_bias(attn_mask, query)
                size = query.shape[-1] ** -0.5 if scale is None else scale
                logits = query @ to_query_heads(key, query.shape[1]).mT * size
                attending = Attending(logits=logits if bias is None else logits + bias)
            key_mask = valid_keys(attn_mask, pair[1].shape[0], pair[1].shape[2])
            self.socket.see(self.module, *pair, key_mask, attending)

    def _queries_and_keys(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor] | None:
        """[b, h, n, d] and [b, g, m, d], if that is what they are."""
        if left.ndim == right.ndim == 3 and len(left) == len(right) and len(left) % self.heads == 0:
            left, right = (t.unflatten(0, (-1, self.heads)) for t in (left, right))
        if left.ndim != 4 or right.ndim != 4 or len(left) != len(right) or left.shape[3] != right.shape[3]:
            return None
        if left.shape[1] != self.heads or self.heads % right.shape[1]:
            return None
        query, key = self._projected("query", left), self._projected("key", right)
        return None if query is None or key is None else (query, key)

    def _projected(self, side: str, tokens: Tensor) -> Tensor | None:
        """The tokens if projections made as many; their output itself where the tokens are a multiple of it."""
        for output in self.outputs[side]:
            if output.numel() == tokens.numel():
                view = self._known_view(side, output, tokens)
                return tokens if view is None else view(output, self.heads)
        rows = len(tokens) * tokens.shape[2]
        return tokens if any(o.numel() == rows * o.shape[-1] for o in self.outputs["fused"]) else None

    def _known_view(self, side: str, output: Tensor, tokens: Tensor) -> "View | None":
        known = self.socket.views
        if (self.module, side) in known:
            return known[self.module, side]
        view = self._view_of(output, tokens)
        if tokens.shape[2] > 1:  # of a single token rotary may change nothing: that tells nothing about others
            known[self.module, side] = view
        return view

    def _view_of(self, output: Tensor, tokens: Tensor) -> "View | None":
        if output.ndim != 3 or output.shape[-1] % self.heads:
            return None
        return next((view for view in VIEWS if _is_multiple(tokens, view(output, self.heads))), None)


View = Callable[[Tensor, int], Tensor]
VIEWS: tuple[View, ...] = (
    lambda output, heads: output.unflatten(-1, (heads, -1)).transpose(1, 2),  # [b, n, h*d]
    lambda output, heads: output.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3),  # [n, b, h*d]
)


def _is_multiple(tokens: Tensor, output: Tensor) -> bool:
    """Whether tokens = c · output, c > 0. It waits for the device: asked once for a module."""
    if tokens.shape != output.shape:
        return False
    one, two = tokens.detach().float(), output.detach().float()
    factor = (one * two).sum() / two.square().sum()
    tolerance = 1e-4 if tokens.dtype == output.dtype == torch.float32 else 0.02
    return bool((factor > 0) & ((one - factor * two).norm() <= tolerance * one.norm()))


# --- the ways to write a product: its operands as [..., n, d] and [..., m, d] ----------------------------------------


def _of_matmul(left: Tensor, right: Tensor, **_: Any) -> tuple[Tensor, Tensor] | None:
    return (left, right.mT) if left.ndim > 2 and right.ndim > 2 else None


def _of_baddbmm(_bias: Tensor, batch1: Tensor, batch2: Tensor, **_: Any) -> tuple[Tensor, Tensor] | None:
    return batch1, batch2.mT


def _of_einsum(equation: str, *operands: Any) -> tuple[Tensor, Tensor] | None:
    tensors = operands[0] if isinstance(operands[0], list | tuple) else operands
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    names = inputs.split(",")
    if not arrow or len(names) != 2 or "." in equation:
        return None
    batch = [axis for axis in result if all(axis in name for name in names)]
    sides = []
    for name, tensor in zip(names, tensors, strict=True):
        own = [axis for axis in name if axis in result and axis not in batch]
        contracted = [axis for axis in name if axis not in result]
        if len(own) != 1 or len(contracted) != 1:
            return None
        sides.append(tensor.permute([name.index(axis) for axis in (*batch, *own, *contracted)]))
    return sides[0], sides[1]


SOFTMAX = re.compile(r"softmax|scaled_dot_product_attention", re.IGNORECASE)
PRODUCTS: dict[str, Callable[..., tuple[Tensor, Tensor] | None]] = {
    "matmul": _of_matmul,
    "__matmul__": _of_matmul,
    "bmm": _of_matmul,
    "baddbmm": _of_baddbmm,
    "einsum": _of_einsum,
}


def _readable(module: nn.Module) -> bool:
    heads = first_integer(module, HEADS)
    return heads is not None and find_projections(module) is not None and _names_softmax(type(module))


def _names_softmax(cls: type) -> bool:
    """Whether code of the class, or a function of its file that it calls, speaks of a softmax; state spaces do not."""
    for member in (member for base in cls.__mro__ for member in vars(base).values()):
        function = inspect.unwrap(member) if callable(member) else None
        names = getattr(getattr(function, "__code__", None), "co_names", ())
        called = (getattr(function, "__globals__", {}).get(name) for name in names)
        codes = (getattr(helper, "__code__", None) for helper in called)
        if any(SOFTMAX.search(name) for name in names) or any(
            SOFTMAX.search(name) for code in codes if code is not None for name in code.co_names
        ):
            return True
    return False
