"""The Trainer of transformers: logs, checkpoints, and losses that are computed outside the model.

`align(model, ...)` alone is enough to train. The callback brings the alignment into the logs and the adversary into
the checkpoints. With label smoothing or `compute_loss_func` the model is given no labels and returns no loss: the
mixin, or `alignment.loss_function`, adds the term to the loss that is computed instead.
"""

import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from alignattn import checkpoint
from alignattn.errors import DataError

if TYPE_CHECKING:
    from alignattn.alignment import Alignment


class AlignmentCallback(TrainerCallback):
    """Made by `alignment.callback()`: `Trainer(..., callbacks=[alignment.callback()])`."""

    def __init__(self, alignment: "Alignment") -> None:
        self.alignment = alignment

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._go_first()

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._go_first()
        self.alignment.meter.read()  # what an earlier training left
        if state.global_step == 0:
            return
        folder = _resumed_from(args, state)
        if not (folder / checkpoint.SETTINGS).is_file():
            raise DataError(
                f"Training goes on from {folder}, which holds no alignment: it was saved without alignment.callback(). "
                "The adversary would begin anew. Begin the training anew, or go on from a checkpoint that has it."
            )
        self.alignment.restore(folder)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        if logs is None or "loss" not in logs:  # evaluation, or the summary at the end
            return
        means = self.alignment.meter.read()
        logs.update(means)
        if state.log_history:  # written before the callbacks were asked
            state.log_history[-1].update(means)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.alignment.advance()  # in every process; it would come anyway, before the next step
        if state.is_world_process_zero:
            self.alignment.save(Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")

    def _go_first(self) -> None:
        """To add to the logs before anyone reports them. The Trainer puts callbacks of users last."""
        for value in _selves_on_the_stack():
            if isinstance(value, CallbackHandler) and self in value.callbacks:
                value.callbacks.remove(self)
                value.callbacks.insert(0, self)
                return


class AlignmentTrainerMixin:
    """`class MyTrainer(AlignmentTrainerMixin, Trainer)`, then `MyTrainer(..., alignment=alignment)`.

    Adds the term to whatever loss the Trainer computes (label-smoothed, by `compute_loss_func`, by a trainer of TRL or
    sentence-transformers), instead of to the model's own, and brings the callback along.
    """

    def __init__(self, *args: Any, alignment: "Alignment", **kwargs: Any) -> None:
        self.alignment = alignment
        alignment.leave_outputs_alone()
        super().__init__(*args, **kwargs)
        trainer: Any = self
        if not any(isinstance(callback, AlignmentCallback) for callback in trainer.callback_handler.callbacks):
            callback = AlignmentCallback(alignment)
            trainer.add_callback(callback)
            trainer.callback_handler.callbacks.remove(callback)
            trainer.callback_handler.callbacks.insert(0, callback)

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        trainer: Any = self
        labels = inputs.get("labels") if isinstance(inputs, dict) else None  # before the Trainer takes them out
        told = super().compute_loss(  # type: ignore[misc]
            model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
        )
        loss, *outputs = told if return_outputs else (told,)
        # The Trainer divides by the batches of an update, unless the loss is taken to know its share of it.
        divides = (
            not trainer.model_accepts_loss_kwargs or num_items_in_batch is None
        ) and trainer.compute_loss_func is None
        batches = getattr(trainer, "current_gradient_accumulation_steps", 1)
        total = None if divides else num_items_in_batch
        loss = self.alignment.added_to(loss, labels, total, otherwise=1.0 if divides else 1 / batches)
        return (loss, *outputs) if return_outputs else loss


class AlignmentTrainer(AlignmentTrainerMixin, Trainer):
    """The Trainer with an alignment."""


def _resumed_from(args: TrainingArguments, state: TrainerState) -> Path:
    """The checkpoint that is gone on from: the Trainer tells callbacks only the step."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        found = frame.f_locals.get("resume_from_checkpoint")
        if isinstance(found, str | Path) and Path(found).is_dir():
            return Path(found)
        frame = frame.f_back
    return Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"


def _selves_on_the_stack() -> list[Any]:
    frame: FrameType | None = sys._getframe()
    found = []
    while frame is not None:
        if "self" in frame.f_locals:
            found.append(frame.f_locals["self"])
        frame = frame.f_back
    return found
