"""Conditional transport by matrices against the same by attention, in value and gradient."""

import pytest
import torch
from problems import random_problem, right_padding

from alignattn.functional import conditional_transport
from alignattn.matching import conditional, plans


def both_ways(monkeypatch, features, **masks):
    """Losses and gradients, by matrices and by attention."""
    found = []
    for largest in (2**18, 0):
        monkeypatch.setattr(plans, "LARGEST", largest)
        leaves = [side.clone().requires_grad_() for side in features]
        losses = conditional_transport(*leaves, **masks)
        outer = torch.randn(losses.shape, generator=torch.Generator().manual_seed(3), dtype=losses.dtype)
        found.append((losses, torch.autograd.grad(losses, leaves, outer)))
    return found


def features(scale=1.0, dtype=torch.float64):
    return *random_problem(seed=1, dtype=dtype), *(scale * side for side in random_problem(seed=2, dtype=dtype))


MASKS = {"query_mask": right_padding([6, 2, 0], 6), "key_mask": right_padding([2, 7, 3], 7)}  # the last has no query


@pytest.mark.parametrize("masks", [{}, MASKS, {"key_mask": MASKS["key_mask"]}], ids=["none", "both", "keys"])
@pytest.mark.parametrize(("scale", "clamped_at"), [(0.1, 1e6), (3.0, 1e6), (3.0, 2.0)])
def test_matrices_and_attention_agree(monkeypatch, masks, scale, clamped_at):
    monkeypatch.setattr(conditional, "LARGEST_FEATURE", clamped_at)
    by_matrices, by_attention = both_ways(monkeypatch, features(scale), **masks)
    torch.testing.assert_close(by_matrices, by_attention, rtol=1e-9, atol=1e-11)


def test_what_stands_at_padding_reaches_neither_value_nor_gradient(monkeypatch):
    clean, _ = both_ways(monkeypatch, features(), **MASKS)
    spoilt = features()
    for side, mask in zip(spoilt, list(MASKS.values()) * 2, strict=True):
        side.masked_fill_(~mask[:, None, :, None], torch.nan)
    dirty, _ = both_ways(monkeypatch, spoilt, **MASKS)
    torch.testing.assert_close(dirty, clean)


def test_half_precision_is_computed_in_single_and_gradients_come_back_in_half():
    leaves = [side.requires_grad_() for side in features(dtype=torch.bfloat16)]
    losses = conditional_transport(*leaves)
    assert losses.dtype == torch.float32
    torch.testing.assert_close(
        losses.double(), conditional_transport(*(side.double() for side in leaves)), rtol=1e-5, atol=1e-6
    )
    losses.sum().backward()
    assert all(side.grad.dtype == torch.bfloat16 for side in leaves)
