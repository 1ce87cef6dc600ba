"""generator="projections" with LoRA: wrapped projections are recomputed, with the dropout they had."""

import pytest
import tiny
import torch
from references import heads
from tiny import observed, padded_batch, valid_tokens
from torch import Tensor, nn

import alignattn
from alignattn.errors import AlignmentWarning
from alignattn.functional import mmd

peft = pytest.importorskip("peft", reason="pip install peft")

NAMES = [f"base_model.model.encoder.layer.{i}.attention.self" for i in range(2)]


def lora(targets: list[str], dropout: float) -> nn.Module:
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=targets, lora_dropout=dropout, init_lora_weights=False)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return peft.get_peft_model(tiny.bert(), config).train()


def dropped_inputs(model: nn.Module) -> dict[str, Tensor]:
    """What lora_A of each wrapped projection is last given: its input after dropout."""
    inputs: dict[str, Tensor] = {}

    def hook(name: str) -> None:
        def before(_: nn.Module, args: tuple[Tensor]) -> None:
            inputs.setdefault(name, args[0].detach())

        model.get_submodule(f"{name}.lora_A.default").register_forward_pre_hook(before)

    for name in NAMES:
        hook(f"{name}.query")
        hook(f"{name}.key")
    return inputs


def adapted(projection: nn.Module, hidden: Tensor, dropped: Tensor) -> Tensor:
    """W x + b + (alpha / r) B A dropout(x), alpha / r = 2."""
    frozen = hidden @ projection.base_layer.weight.T + projection.base_layer.bias
    return heads(frozen + 2 * dropped @ projection.lora_A.default.weight.T @ projection.lora_B.default.weight.T, 4)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_gradient_reaches_the_adapters_of_query_and_key_with_the_dropout_they_had(dropout):
    model = lora(["query", "key", "value"], dropout)
    dropped = dropped_inputs(model)
    alignment = alignattn.align(model, "mmd", 0.3, preset="paper", reduction="mean", generator="projections")
    with observed(model, NAMES) as seen:
        model(**padded_batch("right"))
    term = alignment.loss()
    term.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    alignment.detach()
    model.zero_grad()
    losses = []
    for name in NAMES:
        module, hidden = model.get_submodule(name), seen[name].hidden
        query, key = (adapted(getattr(module, s), hidden, dropped[f"{name}.{s}"]) for s in ("query", "key"))
        losses.append(mmd(query, key, query_mask=valid_tokens("right"), key_mask=valid_tokens("right")).mean())
    expected = 0.3 * sum(losses) / 2
    expected.backward()
    torch.testing.assert_close(term, expected, rtol=1e-4, atol=1e-6)
    assert set(gradients) == {
        f"{n}.{side}.lora_{part}.default.weight" for n in NAMES for side in ("query", "key") for part in "AB"
    }
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_outputs_gradients_and_random_state_are_those_without_alignment(checkpointing):
    """The adapters of the values get the task's gradient alone: bit for bit what they get without us."""
    model = lora(["query", "key", "value"], 0.5)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    ends = []
    for aligned in (False, True):
        alignment = alignattn.align(model, "mmd", generator="projections") if aligned else None
        model.zero_grad()
        torch.manual_seed(5)
        output = model(**padded_batch("right"))[0]
        loss = output.square().mean()
        (loss if alignment is None else loss + alignment.loss()).backward()
        last = model.get_submodule(NAMES[1]).value.lora_B.default.weight.grad.clone()
        of_query = model.get_submodule(NAMES[0]).query.lora_B.default.weight.grad.clone()
        ends.append((output.detach(), last, of_query, torch.get_rng_state()))
        if alignment is not None:
            alignment.detach()
    plain, with_term = ends
    assert torch.equal(plain[0], with_term[0]) and torch.equal(plain[1], with_term[1])
    assert torch.equal(plain[3], with_term[3])
    assert not torch.allclose(plain[2], with_term[2])


def test_checkpointing_changes_no_gradient():
    model = lora(["query", "key"], 0.5)
    alignment = alignattn.align(model, "mmd", weight=1.0, generator="projections")
    found = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        model.zero_grad()
        torch.manual_seed(5)
        (model(**padded_batch("right"))[0].square().mean() + alignment.loss()).backward()
        found.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    alignment.detach()
    torch.testing.assert_close(found[1], found[0])


def test_adapters_on_the_values_alone_bring_a_warning():
    model = lora(["value"], 0.0)
    alignment = alignattn.align(model, "mmd", generator="projections")
    with pytest.warns(AlignmentWarning, match="projections of all 2 .*frozen.*target_modules"):
        model(**padded_batch(None))
    alignment.detach()
