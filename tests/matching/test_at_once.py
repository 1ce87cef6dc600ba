"""Matching differentiated piece by piece, against autograd over the whole."""

import pytest
import torch

from alignattn.config import METHODS, resolve
from alignattn.matching import at_once
from alignattn.matching.matcher import Matcher, MatcherConfig

LAYERS, SAMPLES, HEADS, N, M, WIDTH = 2, 5, 3, 9, 7, 4


def problems(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(LAYERS, SAMPLES, HEADS, N, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    key = torch.randn(LAYERS, SAMPLES, HEADS, M, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    query_mask = torch.rand(LAYERS, SAMPLES, N, generator=generator) < 0.8
    key_mask = torch.rand(LAYERS, SAMPLES, M, generator=generator) < 0.8
    key_mask[0, 1] = False  # a sample with no key at all
    outer = torch.randn(LAYERS, SAMPLES, HEADS, generator=generator)
    return query, key, query_mask, key_mask, outer


def matcher_of(method, preset):
    matcher = METHODS[method][0](resolve(method, None, preset, {}).matcher)
    matcher.ensure(["a", "b"], WIDTH, torch.device("cpu"))
    return matcher


HEAD = (N + M) * WIDTH  # of one sample of one layer


@pytest.mark.parametrize("preset", ["stable", "paper"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("size", "count"),
    [
        (1, LAYERS * SAMPLES * HEADS),
        (HEADS * HEAD, LAYERS * SAMPLES),
        (2 * HEADS * HEAD, LAYERS * -(-SAMPLES // 2)),
        (SAMPLES * HEADS * HEAD, LAYERS),
        (2**30, 1),
    ],
)
def test_losses_and_gradients_are_those_of_the_whole(method, preset, size, count, monkeypatch):
    monkeypatch.setitem(at_once.PIECE, "cpu", size)
    matcher = matcher_of(method, preset)
    query, key, query_mask, key_mask, outer = problems()
    pieces = at_once._pieces(matcher, query, key)
    assert len(pieces) == count

    leaves = [query.clone().requires_grad_(), key.clone().requires_grad_()]
    losses = matcher(*leaves, query_mask, key_mask, ["a", "b"])
    expected = torch.autograd.grad(losses, [*leaves, *matcher.parameters()], outer.to(losses))
    found = at_once.differentiate(matcher, query, key, query_mask, key_mask, ["a", "b"], outer)
    for told, truth in zip((found.losses, found.query, found.key), (losses, *expected[:2]), strict=True):
        torch.testing.assert_close(told, truth.detach(), rtol=1e-9, atol=1e-12)
    for told, truth in zip(found.networks, expected[2:], strict=True):  # the networks are in single precision
        torch.testing.assert_close(told, truth, rtol=1e-4, atol=1e-6)
    assert found.query.abs().max() > 0
    assert all(p.grad is None for p in matcher.parameters())  # nothing is left where nobody asked for it


def test_heads_that_are_transported_to_each_other_stay_together(monkeypatch):
    monkeypatch.setitem(at_once.PIECE, "cpu", 1)
    matcher = matcher_of("ct", "released")
    query, key, *_ = problems()
    assert len(at_once._pieces(matcher, query, key)) == LAYERS * SAMPLES


def test_a_matching_of_ones_own_is_not_cut_up(monkeypatch):
    """It may look at all samples at once."""
    monkeypatch.setitem(at_once.PIECE, "cpu", 1)

    class AcrossSamples(Matcher):
        def losses(self, query, key, query_mask, key_mask, names):
            return (query.mean() - key.mean()).square().expand(query.shape[0] * query.shape[1], query.shape[2])

    matcher = AcrossSamples(MatcherConfig())
    matcher.ensure(["a", "b"], WIDTH, torch.device("cpu"))
    query, key, *_ = problems()
    found = at_once.differentiate(matcher, query, key, None, None, ["a", "b"], torch.ones(LAYERS, SAMPLES, HEADS))
    gap = query.mean() - key.mean()
    torch.testing.assert_close(found.losses, gap.square().expand_as(found.losses))
    count = LAYERS * SAMPLES * HEADS
    torch.testing.assert_close(found.query, (2 * gap * count / query.numel()).expand_as(query))


class OfOnesOwn(Matcher):
    """Each sample for itself, with two parameters that enter alike."""

    separable = True

    def __init__(self, *, learns=True):
        super().__init__(MatcherConfig())
        self.a, self.b = (torch.nn.Parameter(torch.zeros(())) for _ in range(2))
        self.learns = learns

    def losses(self, query, key, query_mask, key_mask, names):
        ones = query.new_ones(query.shape[0] * query.shape[1], query.shape[2])
        return (self.a + self.b) * ones if self.learns else ones


@pytest.mark.parametrize("learns", [True, False])
def test_gradients_that_share_memory_and_losses_without_any(learns, monkeypatch):
    monkeypatch.setitem(at_once.PIECE, "cpu", 1)
    matcher = OfOnesOwn(learns=learns)
    query, key, *_ = problems()
    outer = torch.ones(LAYERS, SAMPLES, HEADS)
    found = at_once.differentiate(matcher, query, key, None, None, ["a", "b"], outer)
    assert found.query is None and found.key is None  # not numbers that nobody computed
    assert found.networks == ([pytest.approx(outer.sum())] * 2 if learns else [None, None])


def test_a_class_that_does_something_else_has_to_say_that_it_is_separable():
    class Another(OfOnesOwn):
        def losses(self, query, key, query_mask, key_mask, names):
            return super().losses(query, key, query_mask, key_mask, names) * query.mean()

    class Renamed(OfOnesOwn):
        pass

    kinds = OfOnesOwn(), Renamed(), Another(), Matcher(MatcherConfig())
    assert [matcher.is_separable() for matcher in kinds] == [True, True, False, False]
    assert all(kind(config()).is_separable() for kind, config in METHODS.values())


@pytest.mark.parametrize("method", ["gan", "ct"])
def test_autocast_around_it_changes_nothing(method):
    matcher = matcher_of(method, "stable")
    query, key, query_mask, key_mask, outer = problems(torch.float32)
    given = (matcher, query, key, query_mask, key_mask, ["a", "b"], outer)
    plain = at_once.differentiate(*given)
    with torch.autocast("cpu", torch.float16):
        cast = at_once.differentiate(*given)
    for one, other in zip((plain.query, *plain.networks), (cast.query, *cast.networks), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("method", ["gan", "mmd"])
def test_what_is_not_wanted_is_not_computed(method):
    matcher = matcher_of(method, "stable")
    query, key, query_mask, key_mask, outer = problems()
    found = at_once.differentiate(
        matcher, query, key, query_mask, key_mask, ["a", "b"], outer, of_query=False, of_key=False
    )
    assert found.query is None and found.key is None
    assert all(gradient is not None for gradient in found.networks)
    assert len(found.networks) == (8 if method == "gan" else 0)


@pytest.mark.parametrize("method", METHODS)
def test_gradients_have_the_precision_of_what_they_are_of(method):
    matcher = matcher_of(method, "stable")
    query, key, query_mask, key_mask, outer = problems(torch.float16)
    found = at_once.differentiate(matcher, query, key, query_mask, key_mask, ["a", "b"], outer)
    assert found.query.dtype == found.key.dtype == torch.float16 and found.losses.dtype == torch.float32


def test_written_over_what_was_matched_gradients_are_the_same_and_zero_where_there_is_none(monkeypatch):
    class OfTheFirst(Matcher):
        separable = True

        def losses(self, query, key, query_mask, key_mask, names):
            lost = query.flatten(0, 1).square().sum((2, 3)) + key.flatten(0, 1).sum((2, 3))
            return lost if query[0, 0, 0, 0, 0] > 0 else lost.detach()

    monkeypatch.setitem(at_once.PIECE, "cpu", 1)
    matcher = OfTheFirst(MatcherConfig())
    matcher.ensure(["a", "b"], WIDTH, torch.device("cpu"))
    query, key, *_ = problems()
    query[:, :, 0, 0, 0] = query[:, :, 0, 0, 0].abs() + 0.1
    query[:, 1, 0, 0, 0] *= -1
    outer = torch.ones(LAYERS, SAMPLES, HEADS)
    expected = 2 * query
    expected[:, 1] = 0.0
    found = at_once.differentiate(matcher, query, key, None, None, ["a", "b"], outer, in_place=True)
    assert found.query is query and found.key is key
    torch.testing.assert_close(query, expected)
    assert (key[:, 1] == 0).all() and (key[:, 0] == 1).all()


@pytest.mark.parametrize("method", ["gan", "ct"])
@pytest.mark.parametrize("names", [["b", "c"], ["d"], ["c", "a"], ["b", "b"]])
@pytest.mark.parametrize("size", [HEAD, SAMPLES * HEADS * HEAD, 2**30])
def test_a_piece_is_given_the_networks_of_its_layers_and_no_others(method, names, size, monkeypatch):
    """Rows of a bank that lie side by side; where they do not, or come twice, all of it."""
    monkeypatch.setitem(at_once.PIECE, "cpu", size)
    matcher = METHODS[method][0](resolve(method, None, "stable", {}).matcher).double()
    matcher.ensure(["a", "b", "c", "d"], WIDTH, torch.device("cpu"))
    matcher.double()
    query, key, query_mask, key_mask, outer = (t[: len(names)] for t in problems())
    leaves = [query.clone().requires_grad_(), key.clone().requires_grad_()]
    losses = matcher(*leaves, query_mask, key_mask, names)
    expected = torch.autograd.grad(losses, [*leaves, *matcher.parameters()], outer.to(losses))
    seen, own = [], matcher.network

    def network(name, *given):
        seen.extend(len(parameter) for parameter in own(name, *given)[0].parameters())
        return own(name, *given)

    monkeypatch.setattr(matcher, "network", network)
    found = at_once.differentiate(matcher, query, key, query_mask, key_mask, names, outer)
    alone = size < 2**30 or names in (["b", "c"], ["d"])
    assert max(seen) == ((1 if size < 2**30 else len(names)) if alone else 4)
    for told, truth in zip((found.losses, found.query, found.key, *found.networks), (losses, *expected), strict=True):
        torch.testing.assert_close(told, truth.detach(), rtol=1e-9, atol=1e-12)
    others = [row for row, name in enumerate("abcd") if name not in names]
    assert not any(told[others].any() for told in found.networks) and found.networks[0].any()


def test_a_class_that_does_something_else_is_given_all_networks():
    kind = METHODS["gan"][0]

    class Own(kind):
        def losses(self, *given):
            return super().losses(*given)

    for matcher, rows in ((kind, ("banks.0.", slice(1, 2))), (Own, None)):
        own = matcher(resolve("gan", None, "stable", {}).matcher)
        own.ensure(["a", "b"], WIDTH, torch.device("cpu"))
        assert own.rows_of(["b"], WIDTH) == rows
        assert own.rows_of(["nobody"], WIDTH) is None
