"""The thing to beat computes what alignment computes: two implementations that share nothing."""

import pytest
import torch

from alignattn.bench.straightforward import LayerLoss
from alignattn.config import METHODS, resolve


def ours(method, **options):
    config = resolve(method, None, "stable", options)
    return METHODS[method][0](config.matcher, seed=3)


def copy_networks(matcher, loss, width):
    matcher.ensure(["layer"], width, torch.device("cpu"))
    for name, network in matcher.banks[0].items():
        target = getattr(loss, name)
        layers = {"first": 0, "second": 2} if name == "navigator" else None
        for part, layer in network.named_children():
            linear = target[layers[part]] if layers else getattr(target, part)
            linear.weight.data, linear.bias.data = layer.weight.data[0].T.clone(), layer.bias.data[0, 0].clone()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("padded", [False, True])
def test_value_and_gradients_are_alignments_own(method, padded):
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(3, 2, 11, 8, generator=generator) * scale + shift for scale, shift in ((1, 0), (2, 0.5)))
    valid = torch.ones(3, 11, dtype=torch.bool)
    if padded:
        valid[1, 7:] = False
    options = {"tolerance": 0.0} if method == "ot" else {}  # as many iterations for every problem
    matcher, loss = ours(method, **options), LayerLoss(method, 8)
    copy_networks(matcher, loss, 8) if method in ("gan", "ct") else matcher.ensure(["layer"], 8, torch.device("cpu"))
    found = []
    for network in (
        lambda q, k: matcher(q[None], k[None], valid[None], valid[None], ["layer"])[0],
        lambda q, k: loss(q, k, valid),
    ):
        sides = [t.clone().requires_grad_() for t in (query, key)]
        values = network(*sides)
        values.sum().backward()
        found.append([values.detach(), *(side.grad for side in sides)])
    for expected, told in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(told, expected, rtol=2e-4, atol=2e-6)
    gradients = [
        sum(p.grad.double().square().sum() for p in m.parameters()) for m in (matcher, loss) if list(m.parameters())
    ]
    if gradients:
        torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=0.0)
