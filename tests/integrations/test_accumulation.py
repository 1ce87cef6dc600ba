"""What alignment adds to an update does not depend on how the update is cut into batches."""

import copy

import pytest
import torch
from tiny_training import ONE_GRADIENT, arguments, make_classifier, sentences
from transformers import Trainer

import alignattn


def language_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes))


def train(model, data, tmp_path, *, batch, accumulate, method=None, **options):
    """One gradient's update of a copy; returns the weights and the alignment."""
    model = copy.deepcopy(model)
    alignment = None if method is None else alignattn.align(model, method, **options)
    cut = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulate}
    args = arguments(tmp_path, **ONE_GRADIENT, **cut)
    Trainer(model=model, args=args, train_dataset=data).train()
    if alignment is not None:
        alignment.advance()
        alignment.detach()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}, alignment


def added(model, data, tmp_path, method, **how):
    """What alignment adds to the update: aligned minus soft."""
    options = {"weight": 0.3} | ({"generator": how.pop("generator")} if "generator" in how else {})
    soft, _ = train(model, data, tmp_path, **how)
    aligned, alignment = train(model, data, tmp_path, method=method, **how, **options)
    return {name: aligned[name] - soft[name] for name in soft}, alignment


@pytest.mark.parametrize("generator", ["model", "projections"])
@pytest.mark.parametrize("method", ["mmd", "gan"])
@pytest.mark.parametrize("make", [make_classifier, language_model])
def test_four_batches_of_three_add_what_one_of_twelve_adds(make, method, generator, tmp_path):
    """BERT's classifier ignores num_items_in_batch, Llama honours it; sentences differ in length."""
    torch.manual_seed(0)
    model, data = make(), sentences(12, tokens=make is language_model)
    whole, one = added(model, data, tmp_path, method, batch=12, accumulate=1, generator=generator)
    parts, four = added(model, data, tmp_path, method, batch=3, accumulate=4, generator=generator)
    assert max(float(value.abs().max()) for value in whole.values()) > 1e-4
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, rtol=2e-3, atol=2e-6)
    assert four.steps == one.steps == 1  # the clock of a ramp counts updates too
    for mine, theirs in zip(one.matcher.parameters(), four.matcher.parameters(), strict=True):
        torch.testing.assert_close(theirs, mine, rtol=1e-3, atol=1e-5)  # the adversary stepped once in both


def test_a_last_update_of_fewer_batches_counts_whole(tmp_path):
    """Three batches where four are to be accumulated: the only update of the epoch has three."""
    model, data = make_classifier(), sentences(6)
    parts, _ = added(model, data, tmp_path, "mmd", batch=2, accumulate=4)
    whole, _ = added(model, data, tmp_path, "mmd", batch=6, accumulate=1)
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, rtol=2e-3, atol=2e-6)


def test_models_whose_loss_the_trainer_divides_are_divided_once(tmp_path):
    torch.manual_seed(0)
    model, data = make_classifier(), sentences(12)
    model.accepts_loss_kwargs = False
    whole, _ = added(model, data, tmp_path, "mmd", batch=12, accumulate=1)
    parts, _ = added(model, data, tmp_path, "mmd", batch=3, accumulate=4)
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, rtol=2e-3, atol=2e-6)


def test_the_adversary_steps_once_an_update_in_a_loop_of_ones_own(bert, batch):
    alignment = alignattn.align(bert, "gan", add_to_outputs=False)
    optimizer = torch.optim.SGD(bert.parameters(), lr=0.1)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    counted = []
    for step in range(6):
        bert(**inputs)
        (alignment.loss() / 3).backward()
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
        states = alignment.adversary.optimizer.state.values()
        counted.append(max([int(s["step"]) for s in states], default=0))
    assert counted == [0, 0, 1, 1, 1, 2]


def test_weights_written_by_hand_count_as_an_update(bert, batch):
    alignment = alignattn.align(bert, "gan", add_to_outputs=False)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    for _ in range(4):
        bert(**inputs)
        alignment.loss().backward()
        with torch.no_grad():
            for parameter in bert.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
                    parameter.grad.zero_()
    steps = {int(s["step"]) for s in alignment.adversary.optimizer.state.values()}
    assert steps == {3}
