"""Queries and keys that a checkpoint computes again are let go when matched, and get their gradients all the same."""

import weakref

import pytest
import torch
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import alignattn
from alignattn.capture.standin import is_kept_for_backward, stand_in
from test_replay import Recorder, assert_alike, batch, model_of


def test_a_stand_in_holds_one_number_and_hands_its_gradient_on():
    leaf = torch.randn(2, 3, 5, 4, dtype=torch.bfloat16, requires_grad=True)
    one = stand_in(leaf * 2)
    assert (one.shape, one.dtype, one.device) == (leaf.shape, leaf.dtype, leaf.device)
    assert one.untyped_storage().nbytes() == 2 and not one.any()
    given = torch.randn(leaf.shape).bfloat16()
    one.backward(given)
    assert torch.equal(leaf.grad, 2 * given)
    assert not stand_in(torch.ones(3)).requires_grad


def test_what_is_kept_for_the_backward():
    seen = []
    leaf = torch.ones(2, requires_grad=True)
    checkpoint(lambda x: seen.append(is_kept_for_backward()) or x * 2, leaf, use_reentrant=False)
    with save_on_cpu():
        seen.append(is_kept_for_backward())
    assert seen == [False, False] and is_kept_for_backward()


@pytest.mark.parametrize("records", [False, True], ids=["plainly", "by records"])
@pytest.mark.parametrize(("method", "options"), [("gan", {}), ("mmd", {"max_tokens": 5}), ("ct", {"weight": 0.0})])
def test_training_is_that_without_checkpoints(method, options, records):
    trained = []
    for checkpointed in (False, True):
        model = model_of()
        if checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        alignment = alignattn.align(model, method, **options)
        alignment.objective.recorder = Recorder() if records else None
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        seen, alive = [], []
        watch, match = alignment._tap._watch, alignment.objective._matched

        def remember(record, seen=seen, watch=watch):
            seen.extend(weakref.ref(side) for side in (record.query, record.key))
            watch(record)

        def count(*given, seen=seen, alive=alive, match=match):
            alive.append(sum(side() is not None for side in seen))
            return match(*given)

        alignment._tap._watch, alignment.objective._matched = remember, count
        for step in range(13):  # looks among them
            seen.clear()
            alive.clear()
            loss = model(**batch(step)).loss
            if alive:  # layer by layer, and not ahead
                assert alive == ([6, 4, 2] if checkpointed else [6, 6, 6][: len(alive)])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert alive or not checkpointed
        trained.append(model)
    assert_alike(*trained)
