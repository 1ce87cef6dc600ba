"""Run by test_processes under torchrun and accelerate launch: two processes on halves of each batch, by every host.

Each host trains with alignment; then model and adversary are compared across the processes, and with a training on the
joined batches in which a process stands for itself.
"""

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from tiny_training import ONE_GRADIENT, arguments, make_classifier, sentences
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import Trainer

import alignattn

STEPS, RATE = 3, 0.1


DATA = sentences(4 * STEPS)


def joined(step: int) -> dict[str, torch.Tensor]:
    part = DATA[4 * step : 4 * step + 4]
    return {name: torch.stack([row[name] for row in part]) for name in part[0]}


def alone(method: str, task: float = 1.0, weight: float | str = 0.5) -> tuple[list[torch.Tensor], alignattn.Alignment]:
    """The same training in one process, on whole batches, the task's loss multiplied by a factor."""
    model = make_classifier().train()
    alignment = alignattn.align(model, method, weight=weight, add_to_outputs=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    all_reduce, dist.all_reduce = dist.all_reduce, lambda flat: flat.mul_(2)  # a process for itself
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = task * model(**joined(step)).loss
        (loss + alignment.loss()).backward()
        optimizer.step()
    alignment.advance()
    dist.all_reduce = all_reduce
    alignment.detach()
    return [p.detach() for p in model.parameters()], alignment


def compare(
    who: str,
    model: nn.Module,
    alignment: alignattn.Alignment,
    method: str,
    task: float = 1.0,
    weight: float | str = 0.5,
) -> None:
    alignment.advance()
    alignment.detach()
    whole, reference = alone(method, task, weight)
    if weight == "auto":
        chosen = [alignment.state_dict()["weight"], reference.state_dict()["weight"]]
        assert chosen[0] > 0
        torch.testing.assert_close(*chosen, rtol=1e-3, atol=0.0)
    mine = [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]
    pairs = [*zip(mine, whole, strict=True), *zip(alignment.parameters(), reference.parameters(), strict=True)]
    for place, (one, other) in enumerate(pairs):
        both = [torch.empty_like(one) for _ in range(2)]
        dist.all_gather(both, one.detach().contiguous())
        assert torch.equal(both[0], both[1]), f"{who}, {method}: tensor {place} differs between processes"
        torch.testing.assert_close(one.detach(), other.detach(), rtol=2e-4, atol=2e-5, msg=lambda m: f"{who}: {m}")
    assert alignment.steps == reference.steps == STEPS, (who, alignment.steps)
    if dist.get_rank() == 0:
        print(f"equal: {who}, {method}", flush=True)


def half(step: int) -> dict[str, torch.Tensor]:
    rank = dist.get_rank()
    return {name: value[2 * rank : 2 * rank + 2] for name, value in joined(step).items()}


def with_trainer(method: str, folder: Path) -> None:
    averaged = method == "gan"  # both of the Trainer's ways of sharing a loss out over processes
    model = make_classifier()
    alignment = alignattn.align(model, method, weight=0.5)
    changes = {"max_steps": STEPS, "learning_rate": RATE, "save_strategy": "steps", "save_steps": 2}
    changes |= {"per_device_train_batch_size": 2, "average_tokens_across_devices": averaged}
    args = arguments(folder, **(ONE_GRADIENT | changes))
    # The sampler deals rows out in turn: 0, 2 | 1, 3. A batch is the same set of rows either way.
    order = [DATA[4 * (i // 4) + [0, 2, 1, 3][i % 4]] for i in range(len(DATA))]
    trainer = Trainer(model=model, args=args, train_dataset=order, callbacks=[alignment.callback()])
    trainer.train()
    assert "alignment_loss" in trainer.state.log_history[0]
    assert (folder / "checkpoint-2" / "alignment.safetensors").is_file()
    # Averaging over labels, the Trainer multiplies the loss by the number of processes, and BERT's classifier does not
    # divide by the labels of all: its task counts twice. Alignment must not.
    compare("Trainer", model, alignment, method, task=2.0 if averaged else 1.0)


def with_accelerate(method: str, weight: float | str = 0.5) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = make_classifier()
    alignment = alignattn.align(model, method, weight=weight)
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=RATE))
    for step in range(STEPS):
        optimizer.zero_grad()
        accelerator.backward(prepared(**half(step)).loss)
        optimizer.step()
    compare("accelerate", model, alignment, method, weight=weight)


def with_fsdp(method: str, folder: Path) -> None:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    model = make_classifier().train()
    alignment = alignattn.align(model, method, weight=0.5)
    for layer in model.bert.encoder.layer:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(**half(step)).loss.backward()
        optimizer.step()
    alignment.advance()
    if dist.get_rank() == 0:
        alignment.save(folder / "alignment")
    state = get_model_state_dict(model)
    assert set(state) == set(make_classifier().state_dict())
    dist.barrier()
    kept = {name: value.full_tensor().clone() for name, value in state.items()}
    saved = {name: value.clone() for name, value in state.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    set_model_state_dict(model, saved)
    for name, value in get_model_state_dict(model).items():
        assert torch.equal(value.full_tensor(), kept[name]), name
    again = make_classifier()
    again.load_state_dict(kept)
    loaded = alignattn.Alignment.load(again, folder / "alignment")
    for one, other in zip(loaded.parameters(), alignment.parameters(), strict=True):
        assert torch.equal(one, other)
    loaded.detach()
    reference, _ = alone(method)
    for name, other in zip((n for n, _ in make_classifier().named_parameters()), reference, strict=True):
        torch.testing.assert_close(kept[name], other, rtol=2e-4, atol=2e-5, msg=lambda m: f"FSDP2: {m}")
    alignment.detach()
    if dist.get_rank() == 0:
        print(f"equal: FSDP2, {method}", flush=True)


def main(hosts: list[str], folder: Path) -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    for method in ("gan", "mmd"):
        if "accelerate" in hosts:
            with_accelerate(method)
        if "fsdp" in hosts:
            with_fsdp(method, folder / f"fsdp-{method}")
        if "trainer" in hosts:
            with_trainer(method, folder / f"trainer-{method}")
    if "accelerate" in hosts:
        with_accelerate("mmd", weight="auto")
    dist.barrier()
    # All has been said. Gloo's threads, taken down with the interpreter, were seen to abort it now and then.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[2:], Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
