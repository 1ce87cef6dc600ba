"""Memory that pieces of a matching use in turn: none is handed out twice at a time, and nothing lives on in it."""

import copy
import pickle
import threading

import pytest
import torch

import alignattn
from alignattn.config import METHODS, resolve
from alignattn.matching import at_once, scratch
from alignattn.matching.matcher import Matcher, MatcherConfig
from alignattn.matching.scratch import Scratch

LIKE = torch.zeros(1)


def places(*shapes):
    return [scratch.empty(shape, LIKE).data_ptr() for shape in shapes]


def test_a_piece_works_where_the_one_before_did_and_nothing_is_handed_out_twice():
    mine = Scratch()
    with mine.piece(reuses=True):
        first = places((4, 3), (5,), (4, 3))
    with mine.piece(reuses=True):
        second = places((4, 3), (2, 2), (3, 3, 1))  # smaller ones lie there too
    assert first == second and len(set(first)) == 3
    with mine.piece(reuses=True):
        larger = scratch.empty((100,), LIKE)
        assert larger.shape == (100,) and larger.is_contiguous()
        assert places((5,)) == first[1:2]


def test_dtypes_and_shapes_are_those_that_are_asked_for():
    with Scratch().piece(reuses=True):
        for dtype in (torch.float32, torch.float64, torch.float16):
            found = scratch.empty((2, 3), LIKE, dtype)
            assert found.dtype == dtype and found.shape == (2, 3) and found.stride() == (3, 1)
        assert scratch.empty((0, 4), LIKE).shape == (0, 4)


def test_it_lies_where_it_is_asked_for_whatever_the_default_device_is():
    with torch.device("meta"), Scratch().piece(reuses=True):
        assert scratch.empty((6,), LIKE).device == LIKE.device
        assert scratch.empty((6,), torch.zeros(1, device="meta")).is_meta  # and elsewhere nothing is kept


def test_outside_of_a_piece_and_in_one_that_does_not_say_so_memory_is_fresh():
    mine = Scratch()
    kept = scratch.empty((6,), LIKE)
    assert not mine.holds(kept)
    with mine.piece(reuses=True):
        inner = scratch.empty((6,), LIKE)
        assert mine.holds(inner)
        assert scratch.outliving(inner).data_ptr() != inner.data_ptr()
        assert scratch.outliving(kept) is kept
        with Scratch().piece(reuses=False):
            assert not mine.holds(scratch.empty((6,), LIKE))
        assert mine.holds(scratch.empty((6,), LIKE))  # back in the piece around it
    with mine.piece(reuses=False):
        assert not mine.holds(scratch.empty((6,), LIKE))


def test_a_thread_that_comes_into_a_piece_of_another_gets_memory_of_its_own():
    mine, found = Scratch(), []

    def elsewhere():
        found.append(scratch.empty((6,), LIKE))
        with mine.piece(reuses=True):
            found.append(scratch.empty((6,), LIKE))

    with mine.piece(reuses=True):
        here = scratch.empty((6,), LIKE)
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert not any(mine.holds(tensor) for tensor in found)
        assert scratch.empty((6,), LIKE).data_ptr() != here.data_ptr()


def test_it_is_given_back_and_copies_of_it_are_empty():
    mine = Scratch()
    with mine.piece(reuses=True):
        scratch.empty((1000,), LIKE)
        mine.give_back()  # not under the feet of who works there
        assert len(mine._blocks) == 1
    for again in (copy.deepcopy(mine), pickle.loads(pickle.dumps(mine))):
        assert again._blocks == []
    assert len(mine._blocks) == 1
    scratch.give_back()
    assert mine._blocks == []


def test_a_piece_that_fails_leaves_it_usable():
    mine = Scratch()
    with pytest.raises(KeyError), mine.piece(reuses=True):
        raise KeyError
    with mine.piece(reuses=True):
        assert mine.holds(scratch.empty((1,), LIKE))


@pytest.mark.parametrize("method", METHODS)
def test_what_a_matching_gives_does_not_lie_where_the_next_one_works(method, monkeypatch):
    monkeypatch.setitem(at_once.PIECE, "cpu", 2 * 7 * 4)  # a problem
    matcher = METHODS[method][0](resolve(method, None, "stable", {}).matcher)
    matcher.ensure(["a"], 4, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    given = [[torch.randn(1, 2, 3, 7, 4, generator=generator) for _ in range(2)] for _ in range(2)]
    outer = torch.ones(1, 2, 3)

    def differentiated(sides):
        return at_once.differentiate(matcher, *sides, None, None, ["a"], outer)

    found = differentiated(given[0])
    told = [found.losses, found.query, found.key, *found.networks]
    assert matcher.scratch._blocks and not any(matcher.scratch.holds(one) for one in told)
    before = [one.clone() for one in told]
    differentiated(given[1])
    assert all(torch.equal(one, other) for one, other in zip(told, before, strict=True))


def test_a_piece_that_cannot_be_cut_to_size_leaves_no_memory_behind(monkeypatch):
    """A graph is matched whole: what that needs is free before the model's backward begins."""
    monkeypatch.setitem(at_once.PIECE, "cpu", 2 * 2 * 9 * 4 - 1)
    alignment = alignattn.Alignment("ct", matched_over="neighbourhoods")
    sides = [torch.randn(1, 2, 9, 4, requires_grad=True) for _ in range(2)]
    alignment.record(*sides, name="a", edges=(torch.arange(9), torch.arange(9).roll(1)))
    alignment.loss().backward()
    assert sides[0].grad.any() and not alignment.matcher.scratch._blocks


class Own(Matcher):
    """Says that it leaves nothing behind, which is for autograd to say too."""

    separable = replayable = True

    def __init__(self, loss):
        super().__init__(MatcherConfig())
        self.loss = loss

    def losses(self, query, key, query_mask, key_mask, names):
        return self.loss(query, key).sum((-1, -2)).flatten(0, 1)


@pytest.mark.parametrize(
    ("loss", "ours"),
    [
        (lambda query, key: query + 2 * key, False),  # one number for many
        (lambda query, key: (query + key).square(), False),  # one tensor for both
        (lambda query, key: query.square() + key.square(), True),
    ],
)
def test_gradients_are_ours_where_each_number_has_a_place_of_its_own(loss, ours):
    sides = [torch.randn(1, 2, 3, 5, 4) for _ in range(2)]
    assert at_once.differentiate(Own(loss), *sides, None, None, ["a"], torch.ones(1, 2, 3)).ours == ours
    own = type("Silent", (Own,), {"losses": Own.losses})(loss)  # of which nobody said anything
    assert not at_once.differentiate(own, *sides, None, None, ["a"], torch.ones(1, 2, 3)).ours


def test_gradients_that_lie_where_the_next_matching_works_are_copied():
    class Tripled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tokens):
            return 3 * tokens

        @staticmethod
        def backward(ctx, outer):
            return torch.mul(outer, 3, out=scratch.empty(outer.shape, outer))

    own = Own(lambda query, key: Tripled.apply(query) + Tripled.apply(key))
    sides = [torch.randn(1, 2, 3, 5, 4) for _ in range(2)]
    found = at_once.differentiate(own, *sides, None, None, ["a"], torch.ones(1, 2, 3))
    at_once.differentiate(own, *sides, None, None, ["a"], torch.zeros(1, 2, 3))
    assert own.scratch._blocks and (found.query == 3).all() and (found.key == 3).all()


def test_detaching_gives_back_what_matching_worked_in():
    model = torch.nn.TransformerEncoder(
        torch.nn.TransformerEncoderLayer(16, 2, 16, batch_first=True), num_layers=1, enable_nested_tensor=False
    )
    alignment = alignattn.align(model, "gan")
    (model(torch.randn(2, 5, 16)).sum() + alignment.loss()).backward()
    assert alignment.matcher.scratch._blocks
    alignment.detach()
    assert not alignment.matcher.scratch._blocks
