"""Times are told from a clock that the test turns itself."""

import gc

import pytest
import torch

from alignattn.bench import clock
from alignattn.bench.memory import peak

CPU = torch.device("cpu")


@pytest.fixture
def now(monkeypatch):
    """Seconds that candidates let pass."""
    passed = [0.0]
    monkeypatch.setattr(clock.time, "perf_counter", lambda: passed[0])
    return passed


def taking(now, seconds):
    calls = []

    def call():
        taken = seconds[min(len(calls), len(seconds) - 1)]
        calls.append(taken)
        now[0] += taken

    return call, calls


def test_median_quartiles_and_the_ratio_within_rounds(now):
    """While the machine is slow both are slow: the ratio of medians would be told wrong."""
    first, _ = taking(now, [1.0] * 2 + [1.0, 1.0, 10.0, 10.0, 10.0])  # one to warm up, one to see how long it takes
    second, _ = taking(now, [9.0] * 2 + [2.0, 2.0, 20.0, 20.0, 20.0])
    told = clock.side_by_side({"first": first, "second": second}, CPU, rounds=5, warmup=1)
    assert (told["first"].median, told["second"].median) == (10.0, 20.0)
    assert (told["first"].ratio, told["second"].ratio, told["second"].rounds) == (1.0, 2.0, 5)
    assert (told["second"].low, told["second"].high) == (2.0, 20.0)


def test_short_calls_are_repeated_and_told_a_call(now):
    short, calls = taking(now, [1e-4])
    told = clock.side_by_side({"short": short}, CPU, rounds=3, warmup=1)
    assert told["short"].median == pytest.approx(1e-4)
    assert len(calls) == 2 + 3 * 20  # two milliseconds at once


def test_so_many_calls_at_once_are_told_a_call(now):
    """Every tenth is dear, wherever a round begins."""
    uneven, calls = taking(now, [1.0] + [*[1.0] * 9, 11.0] * 4)
    told = clock.side_by_side({"uneven": uneven}, CPU, rounds=3, warmup=0, calls=10)
    assert told["uneven"].median == told["uneven"].low == told["uneven"].high == pytest.approx(2.0)
    assert len(calls) == 1 + 3 * 10


def test_each_comes_behind_the_first_and_begins_in_its_turn(now):
    order = []

    def named(name):
        def call():
            order.append(name)
            now[0] += 1.0

        return call

    clock.side_by_side({name: named(name) for name in "abc"}, CPU, rounds=3, warmup=0)
    assert "".join(order) == "abc" + "abac" + "acab" + "abac"


def test_a_machine_that_slows_down_within_a_round_does_not_show(now):
    """Each candidate takes twice as long as the first; and everything ten times as long from the second on."""
    first, _ = taking(now, [1.0] * 2 + [1.0, 10.0])
    second, _ = taking(now, [2.0] * 2 + [2.0])
    third, _ = taking(now, [2.0] * 2 + [20.0])
    told = clock.side_by_side({"first": first, "second": second, "third": third}, CPU, rounds=1, warmup=1)
    assert (told["second"].ratio, told["third"].ratio) == (2.0, 2.0)


def test_quartiles_of_two_lie_between_them(now):
    """Those of what two are drawn from would be guessed beyond, and below zero."""
    one, _ = taking(now, [1.0, 1.0, 1.0, 9.0])
    told = clock.side_by_side({"one": one}, CPU, rounds=2, warmup=1)["one"]
    assert (told.low, told.median, told.high) == (3.0, 5.0, 7.0)


@pytest.mark.parametrize(
    ("count", "ranks"),
    # Of binomial tables: with six values the chance that all are on one side is 1/64 a side; of twenty fewer than six
    # are below with a chance of 0.0207, fewer than seven with 0.0577.
    [(1, (1, 1)), (5, (1, 5)), (6, (1, 6)), (8, (1, 8)), (9, (2, 8)), (20, (6, 15))],
)
def test_the_interval_of_a_median_is_told_by_ranks(count, ranks):
    values = [float((7 * i) % count + 1) if count % 7 else float(i + 1) for i in range(count)]
    assert sorted(values) == [float(i + 1) for i in range(count)]
    assert clock.interval(values) == ranks


def test_what_was_there_before_is_not_looked_through_while_timed(now):
    seen = []

    def call():
        seen.append(gc.get_freeze_count())
        now[0] += 1.0

    clock.side_by_side({"one": call}, CPU, rounds=2, warmup=1)
    assert min(seen[2:]) > 1000 and gc.get_freeze_count() == 0


def test_peak_memory_is_what_lives_at_once(capfd):
    """Four megabytes each: three are alive together, a fourth comes when two have gone."""
    x = torch.ones(1000, 1000)

    def call():
        a = x.clone()
        b = a.clone()
        c = b.clone()
        del a, b
        return c.clone()

    assert peak(call, CPU) == 12_000_000
    assert "profiler" not in capfd.readouterr().err
