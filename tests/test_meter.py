"""What logs show: gathered for many losses, as if each had been added at once."""

import copy
import pickle

import pytest
import torch

from alignattn.meter import MOST, Figures, Meter


@pytest.mark.parametrize("losses", [1, 2, MOST - 1, MOST, MOST + 1, 3 * MOST + 5])
@pytest.mark.parametrize("counted", [None, 1, 3])  # the mean of parts, or their sum
def test_what_is_gathered_is_the_mean_of_all_losses(losses, counted):
    generator = torch.Generator().manual_seed(losses)
    parts = torch.rand(losses, 2, generator=generator, dtype=torch.float64)
    weights = torch.rand(losses, generator=generator, dtype=torch.float64)
    meter = Meter()
    for number, (weight, row) in enumerate(zip(weights, parts, strict=True)):
        given = float(weight) if number % 3 else weight  # a number, or one on a device
        meter.gather(("loss", "weight", "a", "b"), [given, *row.unbind()], Figures(counted))
    whole = weights * (parts.mean(1) if counted is None else counted * parts.sum(1))
    expected = [float(t.mean()) for t in (whole, weights, *parts.unbind(1))]
    assert list(meter.read().values()) == pytest.approx(expected, rel=1e-5)
    assert meter.read() == {}


def test_what_is_gathered_and_what_is_added_at_once_count_alike():
    meter = Meter()
    meter.add(("loss",), torch.tensor(1.0))
    for value in (2.0, 6.0):
        meter.gather(("loss",), [torch.tensor(value, requires_grad=True)])
    assert meter.read() == {"loss": 3.0}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda meter: pickle.loads(pickle.dumps(meter))])
def test_what_waits_is_copied_too(copied):
    meter = Meter()
    for value in (2.0, 4.0):
        meter.gather(("loss", "weight", "a"), [0.5, torch.tensor(value)], Figures(None))
    assert copied(meter).read() == meter.read() == {"loss": 1.5, "weight": 0.5, "a": 3.0}


def test_nothing_of_a_graph_is_kept():
    leaf = torch.ones(3, requires_grad=True)
    loss = (leaf * 2).sum()
    meter = Meter()
    meter.gather(("loss",), [loss])
    ((values,),) = meter._waiting.values()
    assert values[0].grad_fn is None
