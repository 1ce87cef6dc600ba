"""A network that ascends what its tokens descend, against the plain network between two turns of the gradient."""

import pytest
import torch

from alignattn.matching.ascent import ascending
from alignattn.matching.networks import Discriminator, reverse_gradient


def network(**options):
    return Discriminator(["one", "two"], 6, hidden=5, out=3, **options).double()


@pytest.mark.parametrize("layers", [None, torch.tensor([1])])
@pytest.mark.parametrize("options", [{}, {"highway": False}, {"shared_gate": True}], ids=str)
def test_value_and_gradients_are_those_of_the_reversed_network(layers, options):
    critic = network(**options)
    generator = torch.Generator().manual_seed(0)
    shape = 2 if layers is None else 1, 7, 6
    tokens = (2 * torch.randn(shape, generator=generator, dtype=torch.float64)).requires_grad_()
    value = ascending(critic, tokens, layers)
    expected = reverse_gradient(critic(reverse_gradient(tokens), layers))
    torch.testing.assert_close(value, expected)
    outer = torch.randn(value.shape, generator=generator, dtype=torch.float64)
    of = [tokens, *critic.parameters()]
    torch.testing.assert_close(torch.autograd.grad(value, of, outer), torch.autograd.grad(expected, of, outer))


def test_the_tokens_gradient_agrees_with_finite_differences():
    tokens = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    critic = network()
    assert torch.autograd.gradcheck(lambda given: ascending(critic, given, None), tokens)
