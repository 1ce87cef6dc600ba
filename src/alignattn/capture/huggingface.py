"""transformers models whose attention goes through the library's attention interface.

A modeling file looks its attention function up in `ALL_ATTENTION_FUNCTIONS`, by `config._attn_implementation`. While a
model is attached, the files of its attention modules find a stand-in there, which hands out the same functions,
watched. Configs keep their names: files ask whether it is "eager" or "sdpa", masks are built by it, and a copy of the
model must run without us.
"""

import inspect
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from alignattn.capture.attending import Attending
from alignattn.capture.hook import Hook
from alignattn.capture.querykey import AttentionCall, as_bias, causal_bias
from alignattn.capture.site import HEADS, OTHER_TOKENS, WIDTH, ProjectedSocket, Site, attends_elsewhere, first_integer
from alignattn.errors import UnsupportedModelError

if TYPE_CHECKING:
    from alignattn.capture.tap import Tap

SOCKETS = "_alignattn_sockets"  # on an attention module: the sockets that want its calls
INTERFACE = "ALL_ATTENTION_FUNCTIONS"


def uses_interface(module: nn.Module) -> bool:
    """Whether the module looks attention functions up when it is called."""
    config = getattr(module, "config", None)
    return hasattr(config, "_attn_implementation") and _interface_file(type(module)) is not None


def _interface_file(cls: type) -> dict[str, Any] | None:
    """The namespace of the modeling file whose code looks the function up; a class may inherit it from another file."""
    for base in cls.__mro__:
        if base.__module__ == "transformers.modeling_utils":  # PreTrainedModel only manages the names
            continue
        for member in vars(base).values():
            function = inspect.unwrap(member) if callable(member) else None
            if INTERFACE in getattr(getattr(function, "__code__", None), "co_names", ()):
                namespace: dict[str, Any] = function.__globals__  # type: ignore[union-attr]
                return namespace
    return None


class _Known(NamedTuple):
    """Modules that are known to attend to their own tokens, and what they did it by."""

    config: Any  # of all of them: to ask a config takes its time, and most models have one
    implementation: str | None
    modules: list[nn.Module]

    def still_is(self) -> bool:
        """Whether they do it by that."""
        alike = self.config._attn_implementation == self.implementation
        return alike and all(module.config is self.config for module in self.modules)


class HuggingFaceSocket(ProjectedSocket):
    """Stands behind the attention interface of transformers."""

    kind = "attention interface"

    @classmethod
    def find(cls, model: nn.Module) -> list[Site]:
        if "transformers" not in sys.modules:  # then the model cannot be one of its models
            return []
        return [
            Site(name, module, cls.kind, first_integer(module, HEADS), head_width(module))
            for name, module in model.named_modules()
            if uses_interface(module)
        ]

    def __init__(self, tap: "Tap", sites: Sequence[Site]) -> None:
        for site in sites:  # before anything is hooked
            _check(_implementation(site.module), site.module)
        super().__init__(tap, sites)
        self.files = {id(file): file for m in self.sites if (file := _interface_file(type(m))) is not None}
        for file in self.files.values():
            _watch(file)
        # A model may be dropped without detach(); the files outlive it.
        self.release = weakref.finalize(tap.model, _unwatch_all, list(self.files.values()), id(self))
        # One that stands in for attention, or waits for layers to be computed again, may want any call.
        self.never_rests = tap.attend is not None or tap.keeps_nothing
        self._rouse(awake=self.never_rests)
        self._seen: set[nn.Module] = set()
        self._asked: dict[nn.Module, RemovableHandle] = {}  # hooks that tell that a module runs, and on which tokens
        self._known: dict[int, _Known] = {}  # modules without, by id of their config
        for module in self.sites:
            module.__dict__[SOCKETS] = (*module.__dict__.get(SOCKETS, ()), self)
            self._ask(module)

    def _ask(self, module: nn.Module) -> None:
        names = list(inspect.signature(module.forward).parameters)
        hook = Hook(self._note_cross(names))
        self._asked[module] = module.register_forward_pre_hook(hook, with_kwargs=True)

    def settle(self) -> None:
        """No hook on modules that have been seen, and that take no other tokens than their own: nothing is left to ask.

        What a module does it does by its implementation: one that gets another is asked again.
        """
        for module in self._seen & self._asked.keys():
            if OTHER_TOKENS.isdisjoint(inspect.signature(module.forward).parameters) and not self.cross[module]:
                self._asked.pop(module).remove()
                config = module.config
                self._known.setdefault(id(config), _Known(config, _implementation(module), [])).modules.append(module)

    def _rouse(self, *, awake: bool) -> None:
        """Whether calls are anything to us now: while they are nothing to anybody, models are given plain functions."""
        if torch.compiler.is_compiling():  # compiled code goes by what it found, for good
            return
        for file in self.files.values():
            (file[INTERFACE].awake.add if awake else file[INTERFACE].awake.discard)(id(self))

    def close(self) -> None:
        super().close()
        if not self.never_rests:
            self._rouse(awake=False)

    def open(self) -> None:
        super().open()
        self._rouse(awake=True)
        for known in list(self._known.values()):
            if not known.still_is():
                del self._known[id(known.config)]
                self._seen.difference_update(known.modules)
                for module in known.modules:
                    self._ask(module)

    def _note_cross(self, names: list[str]) -> Callable[..., None]:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.tap.active or self.tap.recomputes(module):
                self.cross[module] = attends_elsewhere(names, args, kwargs)
                if module in self.sites and self.tap.records_from(module):
                    self.called(module)

        return before

    def cares(self, module: nn.Module) -> bool:
        """Whether a call of this module is anything to us now."""
        tap = self.tap
        return tap.recording or tap.attend is not None or tap.recomputes(module)

    def see(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        mask: Tensor | None,
        implementation: str | None,
        options: dict[str, Any],
    ) -> None:
        """One call of a watched module."""
        if self.tap.records_from(module):
            if not torch.compiler.is_compiling():  # which goes by the hooks it finds, for good
                self._seen.add(module)
            _check(implementation, module)
            key_mask = self.tap.valid_keys(mask, query.shape[0], key.shape[2])
            # transformers keeps packed documents apart by a mask; without one the row is attended to as a whole.
            segments = None if mask is None else self.tap.segments_for(query, key)
            if segments is not None and isinstance(mask, Tensor) and mask.ndim == 4:
                # One row for all queries is a mask of padding, and keeps nothing apart.
                segments = _kept_apart(segments, mask) if mask.shape[2] == query.shape[2] > 1 else None
            attending = None
            if self.tap.attending:
                bias = _bias(module, query, key, mask, options, implementation)
                attending = Attending(_scale(query, options), bias, options.get("softcap"))
            self.record(module, query, key, key_mask, cross=self.cross[module], segments=segments, attending=attending)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # a copy of an attached model is a plain model

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()  # and so is a pickled one

    def remove(self) -> None:
        super().remove()
        for handle in self._asked.values():
            handle.remove()
        for module in self.sites:
            left = tuple(socket for socket in module.__dict__.get(SOCKETS, ()) if socket is not self)
            if left:
                module.__dict__[SOCKETS] = left
            else:
                module.__dict__.pop(SOCKETS, None)
        self.release()


def _nothing() -> None:
    return None


def head_width(module: nn.Module) -> int | None:
    """The width of a head, where the module says it."""
    width = first_integer(module, WIDTH)
    if width is not None:
        return width
    heads, hidden = first_integer(module, HEADS), first_integer(module, ("embed_dim", "hidden_size", "d_model", "dim"))
    return hidden // heads if heads and hidden else None


# --- the interface -------------------------------------------------------------------------------------------------


class _WatchedInterface:
    """Stands for `ALL_ATTENTION_FUNCTIONS` in one modeling file: the same functions, watched."""

    def __init__(self, plain: Any) -> None:
        self.plain = plain
        self.users = 0
        self.awake: set[int] = set()  # sockets, by id, that want to see calls now
        self._made: dict[tuple[Callable[..., Any], str | None], Callable[..., Any]] = {}

    def get_interface(self, implementation: str | None, default: Callable[..., Any]) -> Callable[..., Any]:
        return self._watched(self.plain.get_interface(implementation, default), implementation)

    def __getitem__(self, implementation: str) -> Callable[..., Any]:
        return self._watched(self.plain[implementation], implementation)

    def _watched(self, function: Callable[..., Any], implementation: str | None) -> Callable[..., Any]:
        """Made once, as every layer asks in every pass; compiled code makes its own, and may be called in any."""
        if torch.compiler.is_compiling():
            return _watched(function, implementation)
        if not self.awake:
            return function
        made = self._made.get((function, implementation))
        if made is None:
            made = self._made[function, implementation] = _watched(function, implementation)
        return made

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)


def _watch(file: dict[str, Any]) -> None:
    if not isinstance(file[INTERFACE], _WatchedInterface):
        file[INTERFACE] = _WatchedInterface(file[INTERFACE])
    file[INTERFACE].users += 1


def _unwatch_all(files: list[dict[str, Any]], socket: int) -> None:
    for file in files:
        file[INTERFACE].awake.discard(socket)
        _unwatch(file)


def _unwatch(file: dict[str, Any]) -> None:
    """Several models, and several taps of one, may be watched in one file, and come off in any order."""
    file[INTERFACE].users -= 1
    if file[INTERFACE].users == 0:
        file[INTERFACE] = file[INTERFACE].plain


def _watched(function: Callable[..., Any], implementation: str | None) -> Callable[..., Any]:
    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        attend = None
        for socket in module.__dict__.get(SOCKETS, ()):
            if socket is None or not socket.cares(module):
                continue
            if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
                socket.tap.forget_outputs(module)  # a cap on logits, or a sink beside them, feels a shift of the keys
            socket.see(module, query, key, attention_mask, implementation, kwargs)
            if socket.stands_in_for(module):
                attend = socket.tap.attend
        if attend is None:
            return function(module, query, key, value, attention_mask, *args, **kwargs)

        def original() -> Any:
            return function(module, query, key, value, attention_mask, *args, **kwargs)

        call = _call(module, query, key, value, attention_mask, kwargs, implementation, original)
        return attend(call).transpose(1, 2).contiguous(), None

    return attention


def _call(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    kwargs: dict[str, Any],
    implementation: str | None,
    original: Callable[[], Any],
) -> AttentionCall:
    strange = [name for name in ("softcap", "s_aux", "cache") if kwargs.get(name) is not None]
    if strange:
        raise UnsupportedModelError(
            f"{type(module).__name__} passes {', '.join(strange)} to its attention, which a stand-in cannot reproduce."
        )
    return AttentionCall(
        module=module,
        query=query,
        key=key,
        value=value,
        scale=_scale(query, kwargs),
        bias=_bias(module, query, key, mask, kwargs, implementation),
        dropout=float(kwargs.get("dropout") or 0.0),
        proceed=lambda: original()[0].transpose(1, 2),
    )


def _bias(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    options: dict[str, Any],
    implementation: str | None,
) -> Tensor | None:
    """What is added to the logits: the mask, causal where there is none and that is meant, and positions."""
    bias = as_bias(None if mask is None else mask[..., : key.shape[2]], query)
    if mask is None and implementation == "sdpa" and query.shape[2] > 1:
        is_causal = options.get("is_causal")
        if getattr(module, "is_causal", True) if is_causal is None else is_causal:
            bias = causal_bias(query, key)
    position = options.get("position_bias")
    if position is not None:
        bias = position if bias is None else bias + position
    return bias


def _scale(query: Tensor, options: dict[str, Any]) -> float:
    scale = options.get("scaling")
    return float(query.shape[-1] ** -0.5 if scale is None else scale)


def _implementation(module: nn.Module) -> str | None:
    name: str | None = module.config._attn_implementation  # type: ignore[union-attr, assignment]
    return name


_readable: set[str | None] = set()  # names that were found so


def _kept_apart(segments: Tensor, mask: Tensor) -> Tensor:
    """Documents as the mask has them: one begins where its first token does not see the token before.

    Positions that do not go on may stand in a row that is attended to as a whole: so with a cache, which keeps
    transformers from looking at them.
    """
    sees = mask if mask.dtype == torch.bool else mask == 0
    before = sees[:, 0].diagonal(-1, -2, -1)  # [b, n - 1]
    begins = (segments.diff(dim=-1) != 0) & ~before
    return nn.functional.pad(begins.long(), (1, 0)).cumsum(-1)


def _check(implementation: str | None, module: nn.Module) -> None:
    """Whether we can read the masks that are given to the functions of this name."""
    if implementation in _readable:
        return
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    name = implementation or "eager"
    if any(kind in name for kind in ("flash", "flex", "paged")) or name not in ALL_MASK_ATTENTION_FUNCTIONS:
        raise UnsupportedModelError(
            f"{type(module).__name__} uses attn_implementation={name!r}, whose masks cannot be read here. "
            "Load it with attn_implementation='sdpa' or 'eager', or call model.set_attn_implementation('sdpa') first."
        )
    _readable.add(implementation)
