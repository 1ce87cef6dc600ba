"""The Trainer of transformers, set up for a run: its arguments, its progress bar, and checkpoints that are whole."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from alignattn.alignment import Alignment
from alignattn.errors import ConfigError
from alignattn.finetune.folder import Folder, mark_whole
from alignattn.finetune.plan import Plan
from alignattn.finetune.settings import Settings
from alignattn.integrations.trainer import AlignmentTrainer

LOOKS = 50  # at the loss, over a run
KEPT = 2  # checkpoints: the older one is there should a kill come while the newer is written


def arguments(settings: Settings, folder: Folder, *, rows: int, processes: int) -> TrainingArguments:
    """Those of the Trainer. What is not said here is its default: AdamW, a rate that falls linearly to zero."""
    cpu = settings.device == "cpu" or not torch.accelerator.is_available()
    if settings.precision == "fp16" and cpu:
        raise ConfigError("--precision fp16 needs an accelerator. On the CPU take fp32, or bf16.")
    steps = settings.steps or math.ceil(math.ceil(rows / settings.batch_size) * settings.epochs)
    values: dict[str, Any] = {
        "output_dir": str(folder.checkpoints),
        "num_train_epochs": settings.epochs,
        "max_steps": settings.steps or -1,
        "learning_rate": settings.learning_rate,
        "per_device_train_batch_size": settings.batch_size // processes,
        "per_device_eval_batch_size": settings.batch_size // processes,
        "seed": settings.seed,
        "bf16": settings.precision == "bf16",
        "fp16": settings.precision == "fp16",
        "use_cpu": cpu,
        "save_strategy": "steps",
        "save_steps": settings.save_steps,
        "save_total_limit": KEPT,
        "logging_steps": max(1, steps // LOOKS),
        "report_to": [],
        "disable_tqdm": True,  # ours is another
        "log_level": "error",
        "log_level_replica": "error",
        "dataloader_pin_memory": not cpu and torch.cuda.is_available(),
    }
    try:
        made = TrainingArguments(**values)
    except (ValueError, ImportError) as error:  # a precision that this machine has not, say
        raise ConfigError(f"The Trainer refuses these settings: {error}") from error
    if not cpu and made.n_gpu > 1:
        made._n_gpu = 1  # several accelerators are torchrun's, not DataParallel's
    return made


def trainer_of(plan: Plan, model: nn.Module, alignment: Alignment | None, args: TrainingArguments) -> Trainer:
    """The Trainer, or the one with an alignment."""
    collate = DataCollatorForTokenClassification if plan.labels.task == "tokens" else DataCollatorWithPadding
    common: dict[str, Any] = {
        "model": model,
        "args": args,
        "train_dataset": plan.train,
        "data_collator": collate(plan.tokenizer),
        "callbacks": [Bar(), Whole()],
        "preprocess_logits_for_metrics": _logits,
    }
    trainer = Trainer(**common) if alignment is None else AlignmentTrainer(**common, alignment=alignment)
    for callback in list(trainer.callback_handler.callbacks):
        if type(callback).__name__ == "PrinterCallback":  # what it prints, the bar shows
            trainer.remove_callback(callback)
    return trainer


class Bar(ProgressCallback):
    """A progress bar with the loss behind it."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if self.training_bar is not None and logs and "loss" in logs:
            shown = {"loss": logs.get("task_loss", logs["loss"])}
            if "alignment_loss" in logs:
                shown["alignment"] = logs["alignment_loss"]
            self.training_bar.set_postfix({name: f"{float(value):.4g}" for name, value in shown.items()})


class Whole(TrainerCallback):
    """Marks a checkpoint when all processes have written their part of it. The last callback, behind alignment's."""

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.barrier()
        if state.is_world_process_zero:
            mark_whole(Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")


def _logits(outputs: Any, _: Any) -> Any:
    """Some models return more."""
    return outputs[0] if isinstance(outputs, tuple | list) else outputs
