"""Tap: watches every attention call of a model, or stands in for it. Taps stack, and come off in any order."""

import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

from alignattn.capture.basis import Basis, find_basis
from alignattn.capture.compiled import CompiledHooks
from alignattn.capture.hook import Hook, in_backward
from alignattn.capture.keybias import KeyBias
from alignattn.capture.querykey import AttentionCall, QueryKey, valid_keys
from alignattn.capture.search import SOCKETS, Layers, choose, find_sites
from alignattn.capture.site import Site, Socket
from alignattn.errors import CaptureError, UnsupportedModelError


class Tap:
    """Attached to a model from when it is made until `remove()`.

    `watch` is given the queries and keys of each call; `attend` computes the attention in the model's place. A record
    is taken iff the module is training and gradients are on, or, with `always`, in every forward pass. The recorder
    is open while the model's own forward runs: a checkpointed layer that is recomputed in the backward pass finds it
    closed, and is handed to `again`, if anywhere.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        watch: Callable[[QueryKey], None] | None = None,
        attend: Callable[[AttentionCall], Tensor] | None = None,
        begin: Callable[[dict[str, Any]], None] | None = None,  # given what the model is called with, by name
        # output, the forward's keyword arguments -> the output instead, or None
        finish: Callable[[Any, dict[str, Any]], Any] | None = None,
        abandon: Callable[[], None] | None = None,  # instead of finish, where the forward pass raised
        recomputed: Callable[[], None] | None = None,  # the model itself runs within a backward pass
        # A recorded call is computed again, as part of a checkpoint: given its queries and keys, and asked before
        # whether any call of a module of this name is still to be, so that others are left alone.
        again: Callable[[QueryKey], None] | None = None,
        awaits: Callable[[str], bool] | None = None,
        layers: Layers = None,
        cross: bool = False,
        always: bool = False,
        projections: bool = False,  # also find what made queries and keys, for a gradient that stops there
        key_biases: bool = False,  # also find the biases of keys, which may be shifted
        bases: bool = False,  # also find where queries and keys can be written in another basis
        attending: bool = False,  # also tell how each call weighs its keys
    ) -> None:
        self.model = model
        self.attend = attend
        self.cross = cross
        self.always = always
        self.projections = projections
        self.attending = attending
        self.recording = False
        self.graphs: tuple[Tensor | None] | None = None  # which graph each node is in, where it is said by hand
        self._watch, self._begin, self._finish, self._abandon = watch, begin, finish, abandon
        self._recomputed, self._again, self._awaits = recomputed, again, awaits
        self._segments: Tensor | None = None
        self._valid: tuple[Tensor, tuple[int, int], Tensor | None] | None = None
        self._calls: dict[str, int] = {}
        self._depth = 0
        self.sites = choose(find_sites(model), layers, model)
        self._sockets: list[Socket] = []
        self._handles: list[Any] = []
        self._at_projections: list[Any] = []  # hooks that keep what they put out
        self._compiled = CompiledHooks()
        self.key_biases: dict[str, KeyBias] = {}
        self.bases: dict[str, Basis] = {}
        self._outputs: dict[tuple[nn.Module, str], Tensor] = {}
        try:
            self._hook_model()  # before the sockets' hooks: the model may itself be an attention module
            for socket in SOCKETS:
                sites = [site for site in self.sites if site.kind == socket.kind]
                if sites and attend is not None and not socket.can_stand_in:
                    raise UnsupportedModelError(
                        f"The attention of {type(model).__name__} ({sites[0].name} and others) can be watched "
                        "through its projections, but it is written out in the module and nothing can stand in for "
                        "it."
                    )
                if sites:
                    self._sockets.append(socket(self, sites))
                self._find_what_is_free(socket, sites, key_biases=key_biases, bases=bases)
            self._compiled.come()
        except BaseException:
            self.remove()
            raise

    @property
    def active(self) -> bool:
        """Whether the running forward pass concerns this tap."""
        return self.recording or (self.attend is not None and self._depth > 0)

    def records_from(self, module: nn.Module) -> bool:
        """Whether a call of this attention module is to be recorded now."""
        if not self.recording:
            return self.recomputes(module)
        if self.always or not module.training:
            return self.always
        if not torch.is_grad_enabled():
            self._refuse_reentrant_checkpointing(module)
            return False
        return True

    @property
    def keeps_nothing(self) -> bool:
        """Whether what is recorded is not to be kept for the backward, where it can be computed again."""
        return self._again is not None

    def recomputes(self, module: nn.Module) -> bool:
        """Whether a recorded call of this module is computed again, and what it was recorded for wants to see it."""
        if self._again is None or self._awaits is None or self.recording or not in_backward():
            return False
        return module.training and torch.is_grad_enabled() and self._awaits(self._name_of(module))

    def take(self, record: QueryKey) -> None:
        """A call was seen by a socket."""
        if not self.recording and self._again is not None:
            self._again(record)
            return
        if self._watch is None:
            return
        call = self._calls.get(record.name, 0)
        self._calls[record.name] = call + 1
        if call:
            record.call = call
        self._watch(record)

    def valid_keys(self, mask: Tensor | None, samples: int, keys: int) -> Tensor | None:
        """Which keys a mask leaves to any query. All layers of a model are given one mask: it is read once."""
        if self.keeps_nothing and not self.recording:
            return None  # of a call that was recorded before, and its mask with it
        if mask is None or torch.compiler.is_compiling():
            return valid_keys(mask, samples, keys)
        if self._valid is None or self._valid[0] is not mask or self._valid[1] != (samples, keys):
            self._valid = mask, (samples, keys), valid_keys(mask, samples, keys)
        return self._valid[2]

    def segments_for(self, query: Tensor, key: Tensor) -> Tensor | None:
        """Which document each token belongs to, where the model was called with packed rows."""
        segments = self._segments
        if segments is None:
            return None
        n = query.shape[2]
        if segments.shape[1] != n or key.shape[2] != n or query.shape[0] % segments.shape[0]:
            return None
        return segments.expand(query.shape[0], n) if segments.shape[0] == 1 else segments

    def _find_what_is_free(self, socket: type[Socket], sites: list[Site], *, key_biases: bool, bases: bool) -> None:
        for site in sites:
            watched: dict[str, nn.Module] = {}
            if bases and socket.is_blind_to_shifts and (basis := find_basis(site.module)) is not None:
                self.bases[site.name] = basis
                if basis.projections is not None:
                    watched |= dict(zip(("query", "key"), basis.projections, strict=True))
            if key_biases and (bias := socket.key_bias(site.module)) is not None:
                self.key_biases[site.name] = bias
                if bias.projection is not None:
                    watched["key"] = bias.projection
            for side, projection in watched.items():
                hook = Hook(self._keep_output(site.module, side))
                self._at_projections.append(projection.register_forward_hook(hook))

    def _keep_output(self, attention: nn.Module, side: str) -> Callable[..., None]:
        def keep(_: nn.Module, __: Any, output: Any) -> None:
            if self.recording and isinstance(output, Tensor):
                self._outputs[attention, side] = output

        return keep

    def output(self, attention: nn.Module, side: str) -> Tensor | None:
        """What the "query" or "key" projection of this module has put out in the call that is being recorded."""
        return self._outputs.pop((attention, side), None) if self._outputs else None

    def forget_outputs(self, attention: nn.Module) -> None:
        """Nothing about the projections of this module is free, in this call."""
        for side in ("query", "key"):
            self._outputs.pop((attention, side), None)

    def settle(self) -> None:
        """Nobody asks for `output` any more, and a pass has been recorded: modules are called faster without hooks."""
        for handle in self._at_projections:
            handle.remove()
        self._at_projections = []
        for socket in self._sockets:
            socket.settle()

    def remove(self) -> None:
        """The model as it was before."""
        self._close()
        for handle in self._at_projections:
            handle.remove()
        for handle in self._handles:
            handle.remove()
        for socket in reversed(self._sockets):
            socket.remove()
        self._handles, self._at_projections, self._sockets = [], [], []
        self._compiled.go()

    # --- the model's own forward ------------------------------------------------------------------------------------

    def _hook_model(self) -> None:
        model = self.model
        if isinstance(model, nn.TransformerEncoderLayer):
            # Hooks on the layer itself would switch off its fused eval path; global ones do not. The layer may be
            # dropped without remove(): they must not keep it alive, nor outlive it.
            mine, layer = weakref.ref(self), weakref.ref(model)

            def before(module: nn.Module, args: Any) -> None:
                if module is layer() and (tap := mine()) is not None:
                    tap._before(module, args, {})

            def after(module: nn.Module, args: Any, output: Any) -> Any:
                tap = mine() if module is layer() else None
                return None if tap is None else tap._after(module, args, {}, output)

            self._handles.append(nn_module.register_module_forward_pre_hook(before))
            self._handles.append(nn_module.register_module_forward_hook(after, always_call=True))
            for handle in self._handles:
                weakref.finalize(model, handle.remove)
            return
        self._handles.append(model.register_forward_pre_hook(Hook(self._before), with_kwargs=True))
        # The last tap to open is the first to close: function modes come off in that order.
        self._handles.append(
            model.register_forward_hook(Hook(self._after), with_kwargs=True, always_call=True, prepend=True)
        )

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if getattr(module, "_is_replica", False):
            raise UnsupportedModelError(
                "nn.DataParallel runs copies of the model in threads, whose attention cannot be told apart. Use one "
                "process a device instead: torchrun or accelerate launch, with DistributedDataParallel."
            )
        if self._depth and not self._still_running():  # an interrupt tore us out of a forward pass
            self.abandon()
        self._depth += 1
        if self._depth > 1:
            return
        training = torch.is_grad_enabled() and any(site.module.training for site in self.sites)
        if training:
            try:
                if not in_backward() and self._begin is not None:
                    self._begin(kwargs)
                elif in_backward() and self._recomputed is not None:
                    self._recomputed()
            except BaseException:
                self._depth = 0
                raise
        training = training and not in_backward()
        self.recording = self.always or training
        self._segments = _packed_segments(kwargs) if self.recording else None
        for socket in self._sockets:
            if self.active:
                socket.given(args, kwargs)
                socket.open()
            elif not in_backward():  # a recomputation must find what the first pass found
                socket.idle()

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if self._depth == 0:  # our own pre-hook raised
            return None
        self._depth -= 1
        if self._depth:
            return None
        recorded = self.recording
        missed = [site for socket in self._sockets for site in socket.missed()]
        self._close()
        failed = output is None and sys.exc_info()[0] is not None
        if recorded and failed:
            self._failed()
        if recorded and not failed and missed:
            self._failed()
            raise UnsupportedModelError(
                f"{missed[0].name} ({type(missed[0].module).__name__}) of {type(self.model).__name__} ran, and no "
                "product of its queries and keys was seen"
                + (f"; the same goes for {len(missed) - 1} others. " if missed[1:] else ". ")
                + "Its attention is no softmax of one such product over all tokens, or is computed in a way not known "
                "here. Leave it out with layers=."
            )
        if recorded and not failed and self._finish is not None:
            return self._finish(output, kwargs)
        return None

    def abandon(self) -> None:
        """The pass that is being recorded has failed."""
        self._close()
        self._failed()

    def _failed(self) -> None:
        if self._abandon is not None:
            self._abandon()

    def _still_running(self) -> bool:
        """Whether the model's own call, beside the one that just begins, is on the stack."""
        calls = 0
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            calls += frame.f_code.co_name == "_wrapped_call_impl" and frame.f_locals.get("self") is self.model
            frame = frame.f_back
        return calls > 1

    def _close(self) -> None:
        self.recording = False
        self._depth = 0
        self._segments = None
        self._valid = None
        self._calls.clear()  # now, not when the next pass begins: compiled code finds the same each time
        self._outputs.clear()
        for socket in reversed(self._sockets):
            socket.close()

    def _refuse_reentrant_checkpointing(self, module: nn.Module) -> None:
        """Gradients are on for the model and off for this module. If that is by re-entrant checkpointing, say so."""
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            inside = isinstance(frame.f_locals.get("ctx"), torch.autograd.function.FunctionCtx)
            if inside and not frame.f_code.co_filename.endswith("checkpoint.py"):
                raise UnsupportedModelError(
                    f"{self._name_of(module)} runs inside an autograd function of the model's own "
                    f"({frame.f_code.co_qualname}), as reversible layers do: queries and keys carry no gradient there."
                )
            if inside:
                raise CaptureError(
                    f"{self._name_of(module)} runs under re-entrant gradient checkpointing, where queries and keys "
                    "carry no gradient and alignment would be lost without a word. Use use_reentrant=False: "
                    "gradient_checkpointing_kwargs={'use_reentrant': False} for the Trainer, checkpoint(..., "
                    "use_reentrant=False) in code of your own."
                )
            frame = frame.f_back

    def _name_of(self, module: nn.Module) -> str:
        return next((site.name for site in self.sites if site.module is module), type(module).__name__)


def _packed_segments(kwargs: dict[str, Any]) -> Tensor | None:
    """Documents in packed rows, told as transformers tells them: positions that do not go on, and no mask given."""
    positions = kwargs.get("position_ids")
    if not isinstance(positions, Tensor) or positions.ndim != 2 or kwargs.get("attention_mask") is not None:
        return None
    return (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
