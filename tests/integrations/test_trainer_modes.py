"""The Trainer's and accelerate's other ways of running a step: checkpointed layers, half precision."""

import copy
import os

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import alignattn

bf16 = pytest.mark.skipif(
    os.environ.get("ONEDNN_MAX_CPU_ISA") != "AVX512_CORE_BF16",
    reason="bf16 products kill the process on some CPUs: set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16, as make test does",
)


@pytest.fixture
def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(vocab_size=50, **sizes, **rates))


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "input_ids": torch.randint(5, 50, (8,), generator=generator),
            "attention_mask": (torch.arange(8) < 4 + i % 5).long(),
            "labels": torch.tensor(i % 2),
        }
        for i in range(8)
    ]


def update(model, data, folder, method, **changes):
    """One step of SGD with rate one under the Trainer: the update is minus the gradient."""
    model = copy.deepcopy(model)
    alignment = alignattn.align(model, method, weight=1.0)
    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=8,
        max_steps=1,
        learning_rate=1.0,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=0,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        train_sampling_strategy="sequential",
        **changes,
    )
    trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[alignment.callback()])
    trainer.train()
    alignment.detach()
    return model.state_dict(), trainer.state.log_history[0], alignment


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
    full, log, _ = update(model, data, tmp_path, method)
    half, log_half, alignment = update(model, data, tmp_path, method, bf16=True)
    assert log_half["alignment_loss"] == pytest.approx(log["alignment_loss"], rel=0.1, abs=0.02)
    name = "bert.encoder.layer.1.attention.self.query.weight"
    start = model.state_dict()[name]
    one, other = (full[name] - start).flatten(), (half[name] - start).flatten()
    assert torch.cosine_similarity(one, other, dim=0) > 0.95
    assert {part.dtype for part in alignment.parts.values()} == {torch.float32}
    assert {p.dtype for p in alignment.matcher.parameters()} <= {torch.float32}


@bf16
def test_bf16_under_accelerate_is_near_to_full_precision(model, data):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    batch = {name: torch.stack([row[name] for row in data]) for name in data[0]}
    gradients = []
    for precision in ("no", "bf16"):
        AcceleratorState._reset_state(True)
        accelerator = Accelerator(cpu=True, mixed_precision=precision)
        mine = copy.deepcopy(model).train()
        alignment = alignattn.align(mine, "gan", weight=1.0)
        prepared, _ = accelerator.prepare(mine, torch.optim.SGD(mine.parameters(), lr=0.1))
        accelerator.backward(prepared(**batch).loss)
        gradients.append(mine.bert.encoder.layer[1].attention.self.key.weight.grad.flatten())
        alignment.detach()
    AcceleratorState._reset_state(True)
    assert torch.cosine_similarity(*gradients, dim=0) > 0.95


def test_fp16_with_a_scaler_takes_the_same_step(model, data):
    """Plain autocast with GradScaler: what reaches weights and adversary is unscaled, and near to full precision."""
    batch = {name: torch.stack([row[name] for row in data]) for name in data[0]}
    found = []
    for scale in (None, 2.0**14):
        mine = copy.deepcopy(model).train()
        alignment = alignattn.align(mine, "gan", weight=1.0)
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", enabled=scale is not None, init_scale=scale or 1.0)
        with torch.autocast("cpu", torch.float16, enabled=scale is not None):
            loss = mine(**batch).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        alignment.advance()
        weight = mine.bert.encoder.layer[1].attention.self.query.weight
        found.append((weight.detach().flatten() - model.state_dict()[_QUERY].flatten(), alignment))
        alignment.detach()
    assert torch.cosine_similarity(found[0][0], found[1][0], dim=0) > 0.98
    assert float(found[1][0].norm()) == pytest.approx(float(found[0][0].norm()), rel=0.1)
    for one, other in zip(found[0][1].parameters(), found[1][1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2.1e-3)  # Adam's first step is the rate, by sign


_QUERY = "bert.encoder.layer.1.attention.self.query.weight"
