"""The operator of compiled code, by itself: what it promises to torch, and its gradients against autograd's."""

import pytest
import torch

import alignattn
from alignattn import traced

B, H, N, D = 2, 3, 5, 4


def beside_each_other():
    return torch.randn(B, N, H, D).transpose(1, 2)


def packed():
    return torch.randn(B, N, 3, H, D)[:, :, 1].transpose(1, 2)


def dense():
    return torch.randn(B, H, N, D)


def repeated():
    return torch.randn(B, 1, N, D).expand(B, H, N, D)


def in_another_order():
    return torch.randn(N, H, B, D).permute(2, 1, 0, 3)


@pytest.mark.parametrize("method", ["mmd", "gan"])
@pytest.mark.parametrize("tokens", [beside_each_other, packed, dense, repeated, in_another_order])
def test_the_operator_is_what_it_says_to_torch_and_its_gradients_are_autograds(method, tokens):
    torch.manual_seed(0)
    alignment = alignattn.Alignment(method, weight=1.0)
    sides = [tokens() for _ in range(4)]  # queries, then keys, of two layers
    mask = torch.tensor([[True] * N, [True] * (N - 2) + [False] * 2])
    records = [
        alignattn.capture.QueryKey(
            query.detach().requires_grad_(), key.detach().requires_grad_(), mask, mask, name=name
        )
        for name, query, key in zip("ab", sides[:2], sides[2:], strict=True)
    ]
    terms = alignment._terms
    terms.make_networks_ahead([], sides[0].device)
    for record in records:
        terms._ensure_networks([record.name], D, mask.device, among=[records])
    learnt = terms.learnt([records])
    wanted = [True, False, True, True, *(True for _ in learnt)]  # not the second layer's queries
    given = [
        terms._name,
        "a\nb",
        [0, 0],
        [2],
        sides,
        [one for r in records for one in traced._beside(r)],
        wanted,
        learnt,
    ]
    operator = torch.ops.alignattn.gradients.default
    torch.library.opcheck(operator, given, test_utils=("test_schema", "test_faketensor"))

    total, parts, scale, gradients = operator(*given)
    leaves = [record.query for record in records] + [record.key for record in records]
    terms.matcher.asked = False
    handed, values, of_layers = terms.objective([records], 1.0, ())
    expected = handed.term(1.0, values)
    torch.testing.assert_close(total, expected.detach())
    torch.testing.assert_close(parts, torch.stack(list(of_layers.values())))
    of_all = torch.autograd.grad(expected, [*leaves, *learnt])
    for at, (wants, gradient, known) in enumerate(zip(wanted, gradients, of_all, strict=True)):
        if wants:
            torch.testing.assert_close(gradient / scale, known)
        else:
            assert gradient.numel() == 0, at
    memory = [gradient.untyped_storage().data_ptr() for gradient in gradients if gradient.numel()]
    assert len(set(memory)) == len(memory)
