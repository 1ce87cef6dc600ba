"""The Trainer's and accelerate's other ways of running a step: checkpointed layers, half precision."""

import copy
import os

import pytest
import torch
from tiny_training import ONE_GRADIENT, arguments, make_classifier, sentences
from transformers import Trainer

import alignattn

QUERY = "bert.encoder.layer.1.attention.self.query.weight"

bf16 = pytest.mark.skipif(
    os.environ.get("ONEDNN_MAX_CPU_ISA") != "AVX512_CORE_BF16",
    reason="bf16 products kill the process on some CPUs: set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16, as make test does",
)


@pytest.fixture
def model():
    return make_classifier(width=32)


@pytest.fixture
def data():
    return sentences(8)


def update(model, data, folder, method, **changes):
    """What one gradient does to a copy under the Trainer: the weights, its logs and the alignment."""
    model = copy.deepcopy(model)
    alignment = None if method is None else alignattn.align(model, method, weight=1.0)
    args = arguments(folder, **ONE_GRADIENT, per_device_train_batch_size=8, **changes)
    callbacks = [] if alignment is None else [alignment.callback()]
    trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=callbacks)
    trainer.train()
    if alignment is not None:
        alignment.detach()
    return model.state_dict(), trainer.state.log_history[0], alignment


def alike(one, other, *, cosine, length):
    """Two gradients that only rounding may set apart."""
    one, other = one.flatten(), other.flatten()
    assert torch.cosine_similarity(one, other, dim=0) > cosine
    assert float(other.norm()) == pytest.approx(float(one.norm()), rel=length)


@pytest.mark.parametrize("method", ["mmd", "gan", "ct"])
def test_checkpointed_layers_give_the_same_update_and_each_record_counts_once(model, data, tmp_path, method):
    plain, log, alignment = update(model, data, tmp_path, method)
    changes = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    again, log_again, other = update(model, data, tmp_path, method, **changes)
    for name, value in plain.items():
        torch.testing.assert_close(again[name], value, rtol=1e-5, atol=1e-7)
    assert log_again["alignment_loss"] == pytest.approx(log["alignment_loss"])
    assert list(alignment.parts) == list(other.parts) == [f"bert.encoder.layer.{i}.attention.self" for i in range(2)]


@bf16
@pytest.mark.parametrize("method", ["mmd", "gan", "ct", "ot"])
def test_bf16_under_the_trainer_is_near_to_full_precision(model, data, tmp_path, method):
    """What alignment alone adds to the update, and the value in the logs."""
    added, logs = [], []
    for changes in ({}, {"bf16": True}):
        soft, _, _ = update(model, data, tmp_path, None, **changes)
        aligned, log, alignment = update(model, data, tmp_path, method, **changes)
        added.append(aligned[QUERY] - soft[QUERY])
        logs.append(log["alignment_loss"])
        assert {part.dtype for part in alignment.parts.values()} == {torch.float32}
        assert {p.dtype for p in alignment.matcher.parameters()} <= {torch.float32}
    assert added[0].norm() > 1e-4
    alike(*added, cosine=0.98, length=0.05)
    assert logs[1] == pytest.approx(logs[0], rel=0.03)


@bf16
def test_bf16_under_accelerate_is_near_to_full_precision(model, data):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    batch = {name: torch.stack([row[name] for row in data]) for name in data[0]}
    added = []
    for precision in ("no", "bf16"):
        gradients = []
        for method in (None, "gan"):
            AcceleratorState._reset_state(True)
            accelerator = Accelerator(cpu=True, mixed_precision=precision)
            mine = copy.deepcopy(model).train()
            alignment = None if method is None else alignattn.align(mine, method, weight=1.0)
            prepared, _ = accelerator.prepare(mine, torch.optim.SGD(mine.parameters(), lr=0.1))
            accelerator.backward(prepared(**batch).loss)
            gradients.append(mine.get_parameter(QUERY).grad)
            if alignment is not None:
                alignment.detach()
        added.append(gradients[1] - gradients[0])
    AcceleratorState._reset_state(True)
    alike(*added, cosine=0.98, length=0.05)


def test_fp16_with_a_scaler_takes_the_same_step(model, data):
    """Plain autocast with GradScaler: what reaches weights and adversary is unscaled, and near to full precision."""
    batch = {name: torch.stack([row[name] for row in data]) for name in data[0]}
    weights, networks = [], []
    for scale in (None, 2.0**14):
        mine = copy.deepcopy(model).train()
        alignment = alignattn.align(mine, "gan", weight=1.0)
        start = torch.cat([p.detach().flatten() for p in alignment.parameters()]).clone()
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", enabled=scale is not None, init_scale=scale or 1.0)
        with torch.autocast("cpu", torch.float16, enabled=scale is not None):
            loss = mine(**batch).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        alignment.advance()
        weights.append(mine.get_parameter(QUERY).detach() - model.get_parameter(QUERY).detach())
        networks.append(torch.cat([p.detach().flatten() for p in alignment.parameters()]) - start)
        alignment.detach()
    alike(*weights, cosine=0.98, length=0.05)
    assert networks[0].abs().max() == pytest.approx(1e-3, rel=0.01)  # Adam's first step is the rate, by sign
    alike(*networks, cosine=0.95, length=0.05)
