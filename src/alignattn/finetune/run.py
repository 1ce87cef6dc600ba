"""One run: trains, measures, and leaves a plain checkpoint and a result file.

Killed at any moment, the same command goes on from the last whole checkpoint and comes to the same weights: batches,
dropout, optimizer and adversary are as they were. Under torchrun every process does the same, and the first one writes.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from alignattn import provenance, results
from alignattn.alignment import Alignment, align
from alignattn.errors import AlignmentError, DataError
from alignattn.experiments.course import Course
from alignattn.experiments.settings import SOFT
from alignattn.finetune.folder import Folder
from alignattn.finetune.model import load_model
from alignattn.finetune.plan import Plan, prepare
from alignattn.finetune.scores import Scores, score
from alignattn.finetune.settings import Settings
from alignattn.models.pretrained import library, quiet
from alignattn.results import Result

Announce = Callable[[str], object]


def finetune(
    settings: Settings, *, processes: int = 1, command: str = "", announce: Announce = lambda _: None
) -> Result:
    """Carry out a run, go on with it, or, where it is finished, read its result."""
    library("accelerate")  # the Trainer needs it
    from alignattn.finetune import training

    plan, folder = prepare(settings, processes), Folder(settings.out)
    decides = plan.decides()
    folder.check(decides)
    if folder.finished:
        announce(f"{folder.path} holds this run already, finished: nothing to do.")
        return results.read(folder.result)
    announce(plan.told())
    with quiet():
        args = training.arguments(settings, folder, rows=len(plan.train), processes=processes)
        library().set_seed(settings.seed)
        model = load_model(settings.model, plan.labels, plan.tokenizer.pad_token_id)
        alignment = _aligned(plan, model)
        try:
            with ExitStack() as until_the_end:

                def take() -> None:
                    folder.claim(decides)
                    until_the_end.enter_context(folder.held())
                    folder.clear_broken_checkpoints()

                _first_alone(take, args.process_index == 0, args.device)
                if (checkpoint := folder.last_checkpoint()) is not None:
                    announce(f"Going on from {checkpoint}.")
                result = _carry_out(plan, folder, training.trainer_of(plan, model, alignment, args), alignment, command)
        except torch.OutOfMemoryError as error:
            raise AlignmentError("The accelerator's memory is full. Lower --batch-size or --max-length.") from error
        finally:
            if alignment is not None:
                alignment.detach()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    return result


def _first_alone(act: Callable[[], None], first: bool, device: torch.device) -> None:
    """Let the first process act while the others wait; what it cannot do, all raise."""
    told: list[str | None] = [None]
    if first:
        try:
            act()
        except AlignmentError as error:
            told = [str(error)]
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.broadcast_object_list(told, src=0, device=device)
    if told[0] is not None:
        raise DataError(told[0])


def _carry_out(plan: Plan, folder: Folder, trainer: Any, alignment: Alignment | None, command: str) -> Result:
    memory = provenance.PeakMemory(trainer.args.device)
    outcome = _train_and_measure(plan, folder, trainer, alignment)
    result = _result(plan, trainer.args.device, command, peak_memory=memory.read(), **outcome)
    if trainer.is_world_process_zero():
        with folder.new_model() as place:
            trainer.accelerator.unwrap_model(trainer.model).save_pretrained(place)
            plan.tokenizer.save_pretrained(place)
        results.write(result, folder.result)
        folder.finish()
    return result


def _aligned(plan: Plan, model: nn.Module) -> Alignment | None:
    if plan.settings.method == "none":
        return None
    return align(model, plan.settings.method, plan.settings.weight, seed=plan.settings.seed)


def _train_and_measure(plan: Plan, folder: Folder, trainer: Any, alignment: Alignment | None) -> dict[str, Any]:
    checkpoint = folder.last_checkpoint()
    start = time.perf_counter()
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    trained = time.perf_counter()
    if alignment is not None:
        alignment.detach()
    scores = _evaluate(plan, trainer)
    course = Course()
    for entry in trainer.state.log_history:
        if "loss" in entry:
            losses = entry.get("task_loss", entry["loss"]), entry.get("alignment_loss", 0.0)
            course.curve.append((entry["step"], *losses))
            if alignment is not None:
                course.tell(entry)
    return {
        "metrics": scores.metrics,
        "details": {**scores.details, **course.details(), "rows_cut": list(plan.cut)},
        "times": {"train": round(trained - start, 4), "evaluate": round(time.perf_counter() - trained, 4)},
    }


def _evaluate(plan: Plan, trainer: Any) -> Scores:
    found = trainer.predict(plan.eval)
    logits, labels = torch.from_numpy(found.predictions), torch.from_numpy(found.label_ids)
    return score(plan.labels.task, plan.labels.names, logits, labels)


def _result(plan: Plan, device: torch.device, command: str, **outcome: Any) -> Result:
    config = plan.alignment
    return provenance.documented(
        config,
        device,
        name="finetune",
        recipe=plan.recipe,
        method=SOFT if config is None else plan.settings.method,
        weight=None if config is None else config.told_weight,
        seed=plan.settings.seed,
        inputs=plan.inputs,
        command=command,
        **outcome,
    )
