"""Gradients that were computed before are handed on, times the factor that each was given with."""

import pytest
import torch

from alignattn import delivery
from alignattn.delivery import Delivery, Slice


@pytest.mark.parametrize("largest", [1, 2**26])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_target_gets_its_own_gradient_times_its_own_factor(monkeypatch, dtype, largest):
    """Parts of two wholes, and others that stand alone, of several factors and precisions."""
    monkeypatch.setattr(delivery, "LARGEST", largest)
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape, dtype=dtype):
        return torch.randn(shape, generator=generator).to(dtype)

    half, weight = 1.0 / 512, torch.tensor(0.7)
    first, second = numbers(3, 2, 4), numbers(2, 5)
    given = [
        *((Slice(first, at), weight) for at in (2, 0, 1)),
        *((Slice(second, at), half) for at in (0, 1)),
        (numbers(6), weight),
        (numbers(2, 3, dtype=torch.float32), half),
        (numbers(1, dtype=torch.float32), half),
        (numbers(dtype=torch.float32), weight),
    ]
    handed, targets, expected = Delivery(), [], []
    for gradient, factor in given:
        alone = gradient.alone() if isinstance(gradient, Slice) else gradient
        targets.append(torch.zeros_like(alone, requires_grad=True))
        handed.to(targets[-1], gradient, factor)
        expected.append((alone.double() * float(factor) * 1024).to(alone.dtype))
    term = handed.term(torch.tensor(1.5), torch.tensor([0.5, 1.5]))
    assert term == 3.0
    term += 1  # who is given it may write to it
    (1024 * term).backward()
    for target, one in zip(targets, expected, strict=True):
        torch.testing.assert_close(target.grad, one)
