"""The adversary owns its networks and their optimizer, outside the user's model."""

import copy
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import alignattn
from alignattn.adversary import Adversary, _averaged
from alignattn.errors import ConfigError


def snapshot(alignment) -> list[torch.Tensor]:
    return [p.detach().clone() for p in alignment.parameters()]


def same(one, other) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("method", ["gan", "ct"])
@pytest.mark.parametrize("generator", ["model", "projections"])
def test_step_is_taken_with_the_models_own_and_not_before(bert, batch, method, generator):
    alignment = alignattn.align(bert, method, generator=generator)
    optimizer = torch.optim.SGD(bert.parameters(), lr=0.1)
    start = snapshot(alignment)
    bert(**batch).loss.backward()
    bert(**batch)  # the model was not updated yet: gradients are being accumulated
    assert same(start, snapshot(alignment))
    torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1).step()  # of another model
    assert same(start, snapshot(alignment))
    optimizer.step()
    moved = snapshot(alignment)
    assert not same(start, moved)
    bert(**batch)
    bert.eval()
    bert(**batch)
    assert same(moved, snapshot(alignment))


def test_adam_of_ones_own_takes_the_same_steps(encoder):
    ours = alignattn.align(encoder, "gan", weight=1.0, adversary_rate=1e-3)
    other_model = copy.deepcopy(encoder)
    theirs = alignattn.align(other_model, "gan", weight=1.0, adversary_optimizer=None)
    optimizer = torch.optim.Adam(theirs.parameters(), lr=1e-3, betas=(0.5, 0.99))
    plain = torch.optim.SGD([*encoder.parameters(), *other_model.parameters()], lr=0.01)
    for step in range(4):
        x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(step))
        for model, alignment in ((encoder, ours), (other_model, theirs)):
            model(x)
            model.zero_grad()
            alignment.loss().backward()
        optimizer.step()
        optimizer.zero_grad()
        plain.step()
    ours.state_dict()  # takes the step that is due
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def trained(kind, *, steps=range(6), state=None, each=lambda optimizer, step: None):
    """A small network's steps: by the adversary, or by torch's own Adam and its `step`."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    adversary = Adversary(network, rate=0.1, betas=(0.5, 0.99))
    adversary.take_on()
    if state is not None:
        network.load_state_dict(state[0])
        adversary.load_state_dict(copy.deepcopy(state[1]))
    optimizer = adversary.optimizer
    for step in steps:
        each(optimizer, step)
        for batch in range(1 + step % 2):  # some updates are of two batches
            x = torch.randn(5, 3, generator=torch.Generator().manual_seed(10 * step + batch))
            loss = network[0](x).square().sum() if step == 4 else network(x).square().sum()  # without the last layer
            (loss * (float("inf") if step == 2 else 1.0)).backward()
        adversary.due = True
        if kind == "adversary":
            adversary.step()
        else:
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in network.parameters()]
            for parameter, gradient in zip(network.parameters(), gradients, strict=True):
                parameter.grad = gradient
            optimizer.found_inf = torch.tensor(float(not all(bool(g.isfinite().all()) for g in gradients)))
            optimizer.step()
            optimizer.zero_grad()
            adversary.due = False
    return network.state_dict(), adversary.state_dict()


def assert_same_steps(one, other):
    assert same(one[0].values(), other[0].values())
    for index, values in other[1]["moments"].items():
        assert one[1]["moments"][index].keys() == values.keys()
        assert same(one[1]["moments"][index].values(), values.values())


def test_steps_are_those_of_the_optimizer_to_the_last_bit(monkeypatch):
    """Accumulated batches, one that is not finite, a layer without a gradient, another rate, and from a saved state."""
    plain = torch.optim.Adam.step
    calls = []
    monkeypatch.setattr(torch.optim.Adam, "step", lambda self: (calls.append(1), plain(self))[1])

    def each(optimizer, step):
        optimizer.param_groups[0] |= {"lr": 0.1 / (1 + step), "weight_decay": 0.01 * (step == 3)}

    ours = trained("adversary", each=each)
    assert len(calls) == 1  # the first, which makes the state
    assert_same_steps(ours, trained("torch", each=each))
    first = trained("torch", steps=range(3), each=each)
    calls.clear()
    again = trained("adversary", steps=range(3, 6), state=first, each=each)
    assert not calls
    assert_same_steps(ours, again)


@pytest.mark.parametrize("who", ["global before", "global after", "before", "after", "scheduler", "other settings"])
def test_whoever_waits_for_the_adversarys_step_is_told_of_each(who):
    """And an optimizer that was given other settings goes by them."""
    seen, handles, optimizers = [], [], []

    def listen(*_):
        seen.append(1)

    def each(optimizer, step):
        optimizers.append(optimizer)
        optimizer._opt_called = False  # as a scheduler notes it
        if step or handles:
            return
        if who == "global before":
            handles.append(register_optimizer_step_pre_hook(listen))
        elif who == "global after":
            handles.append(register_optimizer_step_post_hook(listen))
        elif who == "before":
            handles.append(optimizer.register_step_pre_hook(listen))
        elif who == "after":
            handles.append(optimizer.register_step_post_hook(listen))
        elif who == "scheduler":
            torch.optim.lr_scheduler.StepLR(optimizer, 100)  # counts the calls of `step`
        else:
            optimizer.param_groups[0]["amsgrad"] = True

    try:
        ours = trained("adversary", each=each)
        if who in ("global before", "global after", "before", "after"):
            assert len(seen) == 6
        elif who == "scheduler":
            assert optimizers[0]._opt_called
    finally:
        for handle in handles:
            handle.remove()
    handles.clear()
    if who == "other settings":
        assert_same_steps(ours, trained("torch", each=each))


def test_weight_scales_the_model_and_not_the_adversary(encoder):
    gradients = {}
    for weight in (1.0, 0.1):
        alignment = alignattn.align(encoder, "ct", weight=weight)
        encoder(torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0)))
        encoder.zero_grad()
        alignment.loss().backward()
        model = encoder.layers[0].self_attn.in_proj_weight.grad.clone()
        gradients[weight] = model, [p.grad.clone() for p in alignment.parameters()]
        alignment.detach()
    torch.testing.assert_close(gradients[0.1][0], 0.1 * gradients[1.0][0])
    for one, other in zip(gradients[0.1][1], gradients[1.0][1], strict=True):
        torch.testing.assert_close(one, other)


def test_projections_and_model_give_the_adversary_the_same_gradient(bert, batch):
    found = {}
    for generator in ("model", "projections"):
        alignment = alignattn.align(bert, "gan", generator=generator)
        torch.manual_seed(3)
        bert(**batch).loss.backward()
        found[generator] = [p.grad.clone() for p in alignment.parameters()]
        alignment.detach()
    for one, other in zip(found["model"], found["projections"], strict=True):
        torch.testing.assert_close(one, other)


def test_non_finite_gradient_skips_the_step_and_only_that(encoder):
    alignment = alignattn.align(encoder, "gan")
    x = torch.randn(2, 5, 16)
    start = snapshot(alignment)
    encoder(x)
    (alignment.loss() * float("inf")).backward()
    encoder.zero_grad()
    encoder(x)
    assert same(start, snapshot(alignment))
    alignment.loss().backward()
    encoder.zero_grad()
    encoder(x)
    assert not same(start, snapshot(alignment))
    assert all(p.isfinite().all() for p in alignment.parameters())


def test_networks_start_alike_whatever_else_is_attached(bert):
    whole = alignattn.align(bert, "gan")
    last_of_three = [p[2].clone() for p in whole.parameters()]
    whole.detach()
    alone = alignattn.align(bert, "gan", layers=-1)
    assert same(last_of_three, [p[0] for p in alone.parameters()])
    alone.detach()
    assert not same(last_of_three, [p[2] for p in alignattn.align(bert, "gan", seed=1).parameters()])


def test_number_of_parameters_is_the_papers():
    """Over MCAN's eight self-attentions, heads of 64: 75 k for GAN, 88 k for CT; the paper says 0.1 M."""
    for method, expected in (("gan", 75_000), ("ct", 88_000)):
        alignment = alignattn.Alignment(method, preset="paper")
        for layer in range(8):
            alignment.record(torch.randn(1, 8, 3, 64), torch.randn(1, 8, 3, 64), name=f"{layer}")
        alignment.loss()
        assert sum(p.numel() for p in alignment.parameters()) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("method", ["gan", "ot", "ct", "mmd"])
def test_state_dict_continues_where_it_left_off(bert, batch, method):
    def train(model, alignment, optimizer, steps):
        for step in steps:
            torch.manual_seed(step)
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()

    alignment = alignattn.align(bert, method, weight=alignattn.Ramp(1.0, 4))
    optimizer = torch.optim.AdamW(bert.parameters(), 1e-3)
    train(bert, alignment, optimizer, range(3))
    saved = copy.deepcopy((alignment.state_dict(), optimizer.state_dict(), bert.state_dict()))
    train(bert, alignment, optimizer, range(3, 6))
    resumed = copy.deepcopy(bert)
    resumed.load_state_dict(saved[2])
    again = alignattn.align(resumed, method, weight=alignattn.Ramp(1.0, 4), seed=5)
    again.load_state_dict(saved[0])
    optimizer = torch.optim.AdamW(resumed.parameters(), 1e-3)
    optimizer.load_state_dict(saved[1])
    train(resumed, again, optimizer, range(3, 6))
    assert same(bert.state_dict().values(), resumed.state_dict().values())
    assert again.steps == alignment.steps == 6
    one, other = alignment.state_dict(), again.state_dict()
    assert same(one["networks"].values(), other["networks"].values())


def test_state_of_another_model_or_method_is_refused_and_changes_nothing(bert, encoder):
    alignment = alignattn.align(bert, "gan")
    start = snapshot(alignment)
    foreign = alignattn.align(encoder, "gan").state_dict()
    with pytest.raises(ConfigError, match=r"another model: it has layers\.0\.self_attn"):
        alignment.load_state_dict(foreign)
    with pytest.raises(ConfigError, match="format 99"):
        alignment.load_state_dict(alignment.state_dict() | {"format": 99})
    with pytest.raises(ConfigError, match="of method 'ct'"):
        alignment.load_state_dict(alignment.state_dict() | {"method": "ct"})
    assert same(start, snapshot(alignment))


def test_parameters_before_the_width_is_known_say_what_to_do():
    alignment = alignattn.Alignment("gan", adversary_optimizer=None)
    with pytest.raises(ConfigError, match="Run one training forward"):
        alignment.parameters()
    alignment.record(torch.randn(1, 1, 3, 8), torch.randn(1, 1, 3, 8))
    alignment.loss()
    assert list(alignment.parameters())
    assert not list(alignattn.Alignment("ot").parameters())


def test_layers_that_appear_later_get_networks_too():
    alignment = alignattn.Alignment("gan")
    for names in (["a"], ["a", "b"], ["c", "b"]):
        for name in names:
            alignment.record(torch.randn(1, 1, 3, 8, requires_grad=True), torch.randn(1, 1, 3, 8), name=name)
        alignment.loss().backward()
    assert {name for name, _ in alignment.matcher.rows} == {"a", "b", "c"}
    state = alignment.state_dict()
    again = alignattn.Alignment("gan", seed=3)
    again.load_state_dict(state)
    assert same(state["networks"].values(), again.state_dict()["networks"].values())


def test_two_processes_agree_with_each_other_and_with_one(tmp_path):
    """DDP over gloo: model and adversary equal on both ranks, and equal to one process on the joined batch."""
    script = Path(__file__).parent / "two_processes.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    alone = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # there may be one accelerator for the two of them
    done = subprocess.run(command, cwd=tmp_path, env=alone, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("equal") == 2


@pytest.mark.parametrize("arrived", [True, False])
def test_a_step_of_which_no_process_has_a_gradient_is_told(arrived, tmp_path):
    parameters = [torch.nn.Parameter(torch.zeros(2, 3)), torch.nn.Parameter(torch.zeros(4))]
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, float(number + 1))
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        skip = _averaged(parameters, arrived=arrived)
    finally:
        torch.distributed.destroy_process_group()
    assert skip == (not arrived)
    assert [parameter.grad.unique().tolist() for parameter in parameters] == [[1.0], [2.0]]


def test_no_step_is_taken_where_no_process_has_a_gradient(monkeypatch, tmp_path):
    """One process may have none while others do, and must step with them; if none has any, momentum must not move."""
    network = torch.nn.Linear(3, 2)
    adversary = Adversary(network, rate=0.1, betas=(0.5, 0.99))
    adversary.take_on()
    monkeypatch.setattr("alignattn.adversary.several", lambda: True)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        weights = [network.weight.detach().clone()]
        for has_gradient in (True, False, True):
            if has_gradient:
                network(torch.ones(1, 3)).sum().backward()
            adversary.due = True
            adversary.step()
            weights.append(network.weight.detach().clone())
    finally:
        torch.distributed.destroy_process_group()
    moved = [not torch.equal(one, other) for one, other in itertools.pairwise(weights)]
    assert moved == [True, False, True]
