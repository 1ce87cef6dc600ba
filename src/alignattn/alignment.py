"""Alignment: joins capture and mathematics.

    minimise  -log p(y|x) + weight · L_align

L_align is the mean over samples, and the sum (`paper`) or mean over heads and layers, of the losses of all attention
calls that were captured. (Zhang et al. 2021, equation 1, prints `log p + weight · L_align` "to maximise", and
minimises L_align: a slip of sign.)
"""

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn

from alignattn import checkpoint, state
from alignattn.adversary import Adversary
from alignattn.advice import Advice, summary, why_nothing
from alignattn.balance import Weight
from alignattn.capture import QueryKey, Tap
from alignattn.capture.hook import in_backward
from alignattn.capture.search import Layers, find_sites
from alignattn.config import DEFAULT_METHOD, METHODS, resolve
from alignattn.errors import AlignmentError, CaptureError, ConfigError, DataError, NothingCapturedError, ShapeError
from alignattn.matching.matcher import Matcher
from alignattn.meter import Figures, Meter, with_whole
from alignattn.objective import on_one_device
from alignattn.passes import Pass, Passes, Record
from alignattn.recentre import Recentring
from alignattn.share import share_of_update
from alignattn.stream import refuse_compiled_code
from alignattn.strength import Strength
from alignattn.terms import Terms
from alignattn.updates import Updates
from alignattn.weights import Auto, Schedule

_aligned: WeakSet[nn.Module] = WeakSet()


class Alignment:
    """Matches queries and keys while a model learns its task.

    Made by `align(model, ...)` for a model, or alone for an attention of one's own, which calls `record`. It owns the
    networks that some methods learn; the model's parameters and state dict stay its own.
    """

    def __init__(
        self,
        method: str | Matcher = DEFAULT_METHOD,
        weight: float | Schedule | Auto | str | None = None,
        preset: str = "stable",
        **options: Any,
    ) -> None:
        self.config = resolve(method, weight, preset, options)
        self.matcher: Matcher = (
            method if isinstance(method, Matcher) else METHODS[method][0](self.config.matcher, seed=self.config.seed)
        )
        own = self.config.adversary_optimizer is not None
        self.adversary = (
            Adversary(self.matcher, rate=self.config.adversary_rate, betas=self.config.adversary_betas) if own else None
        )
        if self.adversary is not None:
            self.adversary.take_on()  # a matcher of one's own may bring parameters along
        self._strength = Strength(self.config)
        self._terms = Terms(self.config, self.matcher, self.adversary, self._strength)
        self.objective, self._stream = self._terms.objective, self._terms.stream
        self.parts: dict[str, Tensor] = {}  # of the last loss: each layer's, detached
        self._tap: Tap | None = None
        self._passes = Passes()
        self._adds_to_outputs = self._added_to_outputs = False
        self._advice = Advice()
        self._updates = Updates(self.advance)
        self.meter = Meter()  # what logs show

    # --- a model ----------------------------------------------------------------------------------------------------

    def attach(self, model: nn.Module, layers: Layers = None) -> Self:
        """Capture the attention of a model; `align` does this."""
        if self._tap is not None:
            raise AlignmentError(
                f"This alignment is attached to {type(self._tap.model).__name__} already. Make another."
            )
        if isinstance(model, nn.Module) and any(module in _aligned for module in model.modules()):
            raise AlignmentError(
                f"{type(model).__name__} is aligned already. Call detach() on its alignment first, or use that one."
            )
        config = self.config
        self._updates = Updates(self.advance, model)
        self._adds_to_outputs = config.add_to_outputs and _is_transformers(model)
        self._tap = Tap(
            model,
            watch=self._keep,
            begin=self._begin,
            finish=self._finish,
            abandon=self._passes.abandon,
            recomputed=self._recomputed,
            again=None if self._stream is None else self._stream.again,
            awaits=None if self._stream is None else self._stream.awaits,
            layers=layers,
            cross=config.cross,
            projections=config.generator == "projections",
            key_biases=config.recentre,
        )
        self._terms.recentring = Recentring(self._tap.key_biases) if self._tap.key_biases else None
        self._terms.failed = self._tap.abandon
        try:
            # nn.MultiheadAttention keeps its queries and keys to itself: what is matched there are copies.
            self._strength.balance.at_weights = all(
                isinstance(site.module, nn.MultiheadAttention) for site in self._tap.sites
            )
            _aligned.update(site.module for site in self._tap.sites)
            device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
            matched = [site for site in self._tap.sites if config.cross or not site.looks_cross]
            self._terms.make_networks_ahead(matched, device)
            self.meter.expect(_figures_of(site.name for site in matched), device)
            if self._adds_to_outputs:
                self.meter.expect(("task_loss",), device)
        except BaseException:
            self.detach()
            raise
        return self

    def detach(self) -> None:
        """The plain model again, with its attention, hooks, parameters and state dict as they were."""
        self._strength.balance.forget()
        if self._tap is not None:
            _aligned.difference_update(site.module for site in self._tap.sites)
            self._tap.remove()
            self._tap = None
            self._terms.recentring = self._terms.failed = None
        self._passes.clear()
        self.objective.forget_replays()
        self._added_to_outputs = False

    def _is_training(self) -> bool:
        return self._tap is not None and any(site.module.training for site in self._tap.sites)

    def summary(self) -> str:
        """Which layers and how many heads are attached, and how they are matched."""
        return summary(self.config, self._tap)

    @contextmanager
    def graphs(self, of_nodes: Tensor | None) -> Iterator[None]:
        """Within it, forwards of a model with graph attention are of a batch of graphs: `of_nodes` [nodes] counts them.

        For a model whose arguments don't tell which graph each node is in. None: all nodes are in one graph, whatever
        the arguments seem to tell.
        """
        if self._tap is None or not any(site.kind == "graph attention" for site in self._tap.sites):
            raise AlignmentError("graphs() is for an alignment that is attached to a model with graph attention.")
        if of_nodes is not None and (
            of_nodes.ndim != 1 or of_nodes.is_floating_point() or of_nodes.dtype == torch.bool
        ):
            raise ShapeError(
                f"graphs() takes whole numbers [nodes], the graph of each; got {of_nodes.dtype} of shape "
                f"{tuple(of_nodes.shape)}."
            )
        tap, before = self._tap, self._tap.graphs
        tap.graphs = (of_nodes,)
        try:
            yield
        finally:
            tap.graphs = before

    # --- what is captured -------------------------------------------------------------------------------------------

    def record(
        self,
        query: Tensor,
        key: Tensor,
        query_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
        *,
        name: str | None = None,
        edges: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """In an attention of one's own: these are the queries [b, h, n, d] and keys [b, h, m, d] of one call.

        Masks are boolean [b, n] and [b, m], True = valid. Without gradients, and when a checkpointed layer is
        computed once more in the backward pass, nothing is recorded. `name` tells layers apart; by default it is
        their order since the last loss. A name that comes again begins another pass, over which loss() averages,
        unless it came last: then its layer was called once more. `edges` are for matched_over="neighbourhoods": of
        each the place of its query and that of its key, counted through all samples.
        """
        if self._tap is not None:
            raise AlignmentError(
                "This alignment records the attention of its model by itself. Use an Alignment of its own."
            )
        if self.config.generator == "projections":
            raise ConfigError(
                "record() is given queries and keys, not their projections. For generator='projections' compute "
                "them from a detached input, and leave generator at 'model'."
            )
        if not torch.is_grad_enabled():
            return
        if in_backward():
            if self._stream is not None and self._stream.awaits(name):
                self._stream.again(QueryKey(query, key, query_mask, key_mask))
            return
        record = self._passes.numbered(query, key, (query_mask, key_mask), name, edges)
        begins = self._passes.begins(record)
        if begins:
            self._begin()
        taken = self._taken(record)
        if begins:
            self._passes.add_first(taken)
        else:
            self._passes.add(taken)

    def _keep(self, record: QueryKey) -> None:
        """A call of the pass that is being recorded."""
        self._passes.add(self._taken(record))
        if torch.compiler.is_compiling() or not self.objective.ahead.expects:
            return
        recording = self._passes.recording
        if recording is not None and not self._passes and not self._strength.is_time_to_look():
            self.objective.ahead.notice(cast("list[QueryKey]", recording.records))

    def _taken(self, record: QueryKey) -> Record:
        """What is kept of a call until the loss: all of it, or with `stream` its own losses."""
        return record if self._stream is None else self._terms.match(record, first=self._passes.are_none)

    def _begin(self, kwargs: dict[str, Any] | None = None) -> None:
        """A training forward is about to run, of a model that is called with these."""
        self._added_to_outputs = False
        self._passes.begin()
        if torch.compiler.is_compiling():  # the rest is for Python alone; `advance` does what cannot wait
            if self._stream is not None:
                refuse_compiled_code()
            return
        if self._updates.happened():
            self._advance(surely=self._updates.written)
            self._updates.remember()  # what we shift ourselves is no update
        self.objective.ahead.begin()
        if kwargs and (share := self._share_of_update(kwargs)) is not None:
            self._passes.weigh_next(share)
        self.objective.finite.look(but=1)  # the last forward is asked about when the model is updated
        self._advice.if_frozen(self._tap)
        if self.steps == 0 and (self.matcher.rows or callable(self.config.weight)):
            self._advice.if_resumed_anew()
        if self.adversary is None:
            self._advice.if_nobody_optimizes(self.matcher, self.config.method, self.steps)

    def _finish(self, output: Any, kwargs: dict[str, Any]) -> Any:
        """A training forward has run: add the term to its loss, or keep the records for loss()."""
        done = self._passes.end()
        if done is None:
            self._advice.of_silence(self._tap)
            return None
        has_labels = kwargs.get("labels") is not None
        if torch.compiler.is_compiling() and (share := self._share_of_update(kwargs)) is not None:
            self._passes.weigh(share)
        if self._adds_to_outputs:
            if hasattr(output, "to_tuple") and _is_number(getattr(output, "loss", None)):
                self._note_task(output["loss"])
                output["loss"] = output["loss"] + self._handed_out(done).to(output["loss"].device)
                return output
            if isinstance(output, tuple) and has_labels and _is_number(output[0]):
                self._note_task(output[0])
                return (output[0] + self._handed_out(done).to(output[0].device), *output[1:])
        done.watch_backward()
        return None

    def _note_task(self, loss: Tensor) -> None:
        """For the logs: the model's own loss, in whose place another is handed out."""
        if torch.compiler.is_compiling():
            self.meter.add(("task_loss",), loss)
        else:
            self.meter.gather(("task_loss",), [loss])

    def _share_of_update(self, kwargs: dict[str, Any]) -> Callable[[int], Tensor] | None:
        """What the samples of a forward count, where the host tells how many labels an update has."""
        labels, items = kwargs.get("labels"), kwargs.get("num_items_in_batch")
        if labels is None or items is None or self._tap is None:
            return None
        return share_of_update(self._tap.model, labels, items, kwargs.get("shift_labels"))

    def _handed_out(self, done: Pass) -> Tensor:
        """The term, which becomes part of the model's own loss."""
        self._added_to_outputs = True
        term = self._term()
        self._passes.hand_out(done, term)
        return term

    def _recomputed(self) -> None:
        """The model runs within a backward pass. As a checkpoint it ran before, and was recorded."""
        if not self._strength.open and not self._passes:
            raise CaptureError(
                "The model runs within a backward pass, and did not run in training mode with gradients before: so do "
                "losses that cache gradients (Cached... in sentence-transformers). Alignment cannot reach them: use "
                "the loss that does not cache."
            )

    # --- the loss ---------------------------------------------------------------------------------------------------

    def loss(self) -> Tensor:
        """The weighted alignment term of all training forwards since the last call, to be added to the task loss.

        It averages over those forwards and forgets them.
        """
        if self._added_to_outputs:
            raise CaptureError(
                "The alignment term is in outputs.loss already. Don't add alignment.loss() to it; or pass "
                "add_to_outputs=False to align() and add it yourself."
            )
        if not self._passes:
            raise NothingCapturedError(why_nothing(self._tap))
        return self._term()

    def _term(self) -> Tensor:
        forwards = self._passes.take()
        weight = self._strength.weight()
        self._strength.begin()
        self.objective.alone = not self._added_to_outputs
        term, self.parts = self._terms.of(forwards, weight)
        self._measure(weight)
        if self.adversary is not None:
            self.adversary.due = True
        return term

    @property
    def steps(self) -> int:
        """Updates of the model that alignment had a part in, the one under way included."""
        return self._strength.steps

    def advance(self) -> None:
        """The model has been updated: take the adversary's step that is due, and let the weight's clock go on.

        Happens by itself when an optimizer of torch's has stepped, or, where the model is updated by hand, before the
        next training forward. Every process must call this together.
        """
        self._advance(surely=True)

    def _advance(self, *, surely: bool) -> None:
        """`surely`: weights are known to be others than before, and not merely taken to be."""
        self.objective.finite.look()
        if surely:
            self._passes.settle()
        self._advice.if_frozen(self._tap)
        if self._strength.balance.is_blind:
            self._advice.of_compiled_code(self.config.first_weight)
        if self.adversary is not None:
            self.adversary.step()
        recentring = self._terms.recentring
        if recentring is not None and surely:
            if self._strength.is_time_to_look():
                recentring.close(first=self._strength.closed == 0)
            else:
                recentring.forget()
        if surely and self._strength.is_time_to_look():
            self._settle()
        device = next((part.device for part in self.parts.values()), None)
        figures = self._strength.advance(self.matcher.figures(), device)
        if figures:
            self.meter.add(tuple(figures), torch.stack([value.to(device).float() for value in figures.values()]))

    def _settle(self) -> None:
        """Hooks that were there to find something out go when it is known, but for code that was compiled with them."""
        recentring = self._terms.recentring
        if self._tap is not None and not self._terms.compiled and (recentring is None or recentring.is_sure):
            self._tap.settle()

    def _measure(self, weight: Weight) -> None:
        """For the logs: the weighted loss of this batch, the weight, and each layer's part, unweighted."""
        counted = None if self.config.reduction == "mean" else self.objective.counted
        parts = self.parts.values()
        if not torch.compiler.is_compiling():
            self.meter.gather(_figures_of(self.parts), [weight, *parts], Figures(counted))
            return
        along = on_one_device(list(parts), torch.stack)
        if not (isinstance(weight, Tensor) and weight.device == along.device):
            weight = along.new_ones(()) * weight
        self.meter.add(_figures_of(self.parts), with_whole(torch.cat([weight[None], along])[None], counted)[0])

    def loss_function(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A loss function with the term added, for a host that computes the loss outside the model.

        Such as `compute_loss_func` of transformers' Trainer: `function(outputs, labels, num_items_in_batch=...)`.
        """

        @functools.wraps(function, updated=())
        def with_term(*args: Any, **kwargs: Any) -> Tensor:
            loss = function(*args, **kwargs)
            labels = kwargs["labels"] if "labels" in kwargs else args[1] if len(args) > 1 else None
            return self.added_to(loss, labels, kwargs.get("num_items_in_batch"))

        return with_term

    def added_to(
        self, loss: Tensor, labels: Tensor | None = None, total: Tensor | int | None = None, *, otherwise: float = 1.0
    ) -> Tensor:
        """A loss that was computed outside the model, with the term of this batch added; as it is in evaluation.

        `total` is the number of labels in all batches of an update, where the host divides by nothing: samples then
        count by their `labels`. The term is multiplied by `otherwise` where that cannot be told.
        """
        if not self._passes and not (self._is_training() and torch.is_grad_enabled()):
            return loss
        self.meter.add(("task_loss",), loss)
        if total is not None and isinstance(labels, Tensor) and self._tap is not None:
            self._passes.weigh(share_of_update(self._tap.model, labels, total))
            otherwise = 1.0
        elif self._passes.are_weighed():
            otherwise = 1.0
        return loss + otherwise * self.loss().to(loss.device)

    def leave_outputs_alone(self) -> None:
        """Whoever computes the loss will add the term: as `add_to_outputs=False`."""
        self._adds_to_outputs = False

    # --- the networks -----------------------------------------------------------------------------------------------

    def parameters(self) -> Iterator[nn.Parameter]:
        """The networks' parameters, for a joint optimizer of one's own (`adversary_optimizer=None`)."""
        if not self.matcher.rows and self.matcher.networks(["probe"], 1):
            raise ConfigError(
                "The networks are made when the width of a head is known, and this model does not tell it. Run one "
                "training forward and loss() first."
            )
        return self.matcher.parameters()

    def state_dict(self) -> dict[str, Any]:
        """Networks, their optimizer and the step, to continue from.

        A step that is due is taken first, unless there are several processes: one of them may save alone, and must
        not wait for the others. Then its gradients are saved; to have the step in the state, call `advance()` in every
        process before.
        """
        state_now = state.take(self.matcher, self.adversary, method=self.config.method, steps=self.steps)
        state_now["distances"] = self._strength.distances.state_dict() if self.config.until_met else {}
        return state_now | self._strength.balance.state_dict()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from what state_dict() gave. Nothing is changed if it does not fit."""
        layers = None if self._tap is None else {site.name for site in self._tap.sites}
        method = self.config.method
        self.objective.thinning.forget()
        self._strength.set_clock(state.put(saved, self.matcher, self.adversary, method=method, layers=layers))
        self._strength.balance.load_state_dict(saved)
        self._strength.distances.load_state_dict(saved.get("distances", {}))

    def save(self, folder: str | Path) -> None:
        """Write networks, their optimizer and the configuration: two small files, nothing of the model."""
        layers = [] if self._tap is None else [site.name for site in self._tap.sites]
        checkpoint.write(Path(folder), self.config, layers, self.state_dict())

    def restore(self, folder: str | Path) -> None:
        """Continue from what save() wrote. Nothing is changed if it does not fit."""
        _, _, saved = checkpoint.read(Path(folder))
        self.load_state_dict(saved)

    @classmethod
    def load(cls, model: nn.Module, folder: str | Path) -> Self:
        """Attach to a model what save() wrote, configured as it was, to the layers that it had."""
        arguments, layers, saved = checkpoint.read(Path(folder))
        known = {site.name for site in find_sites(model)}
        strangers = [name for name in layers if name not in known]
        if strangers:
            raise DataError(f"{folder} is of another model: it has {strangers[0]}, and {type(model).__name__} has not.")
        alignment = cls(**arguments).attach(model, layers or None)
        try:
            alignment.load_state_dict(saved)
        except BaseException:
            alignment.detach()
            raise
        return alignment

    def callback(self) -> Any:
        """For transformers' Trainer: `Trainer(..., callbacks=[alignment.callback()])`.

        The term, the task's loss and each layer's part go to the logs, the adversary into the checkpoints.
        """
        from alignattn.integrations.trainer import AlignmentCallback

        return AlignmentCallback(self)


def align(
    model: nn.Module,
    method: str | Matcher = DEFAULT_METHOD,
    weight: float | Schedule | Auto | str | None = None,
    preset: str = "stable",
    *,
    layers: Layers = None,
    **options: Any,
) -> Alignment:
    """Let `model` train with aligned queries and keys, in place; returns the Alignment.

    `method` is "gan", "ot", "ct" or "mmd", or a Matcher; `weight` a number, a function of the step, or "auto", which
    begins with alignment's gradient at a fifth of the task's (`Auto(share)`: at another share) and then only falls;
    `preset` "stable", "paper" or "released". `layers` chooses attention modules by index, name or pattern. Other
    options are those of AlignmentConfig and of the method's config, e.g. generator="projections", reduction="sum",
    epsilon=0.05.

    A transformers model then carries the term in `outputs.loss` in training mode. For any other:
    `loss = criterion(model(x), y) + alignment.loss()`.
    """
    return Alignment(method, weight, preset, **options).attach(model, layers)


def _is_transformers(model: Any) -> bool:
    """Whether the model is of transformers, or PEFT's wrapper around one."""
    kinds = [("transformers", "PreTrainedModel"), ("peft", "PeftModel")]
    classes = tuple(getattr(sys.modules[home], name) for home, name in kinds if home in sys.modules)
    return isinstance(model, classes)


def _figures_of(layers: Iterable[str]) -> tuple[str, ...]:
    """What logs show of a loss."""
    return ("alignment_loss", "alignment_weight", *(f"alignment/{name}" for name in layers))


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 0
