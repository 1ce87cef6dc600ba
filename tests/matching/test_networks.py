"""The networks are the paper's equations, layer by layer, and the matchers put them together as the presets say."""

import pytest
import torch
import torch.nn.functional as F
from geomloss import SamplesLoss

import alignattn
from alignattn.matching.networks import Discriminator, LayeredLinear, Navigator, reverse_gradient

NAMES = ["first", "second", "third"]
TOKENS = torch.randn(3, 10, 6, generator=torch.Generator().manual_seed(0))


def layer(linear: LayeredLinear, row: int, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, linear.weight[row].T, linear.bias[row, 0])


def highway_mlp(net: Discriminator, row: int, x: torch.Tensor, *, shared: bool = False) -> torch.Tensor:
    transform = layer(net.transform, row, x)
    gate = torch.sigmoid(transform if shared else layer(net.gate, row, x))
    x = gate * F.relu(transform) + (1 - gate) * x
    return layer(net.second, row, F.leaky_relu(layer(net.first, row, x)))


@pytest.mark.parametrize("shared", [False, True])
def test_discriminator_is_highway_then_two_layers(shared):
    net = Discriminator(NAMES, 6, hidden=5, out=1, shared_gate=shared)
    for row in range(3):
        torch.testing.assert_close(net(TOKENS)[row], highway_mlp(net, row, TOKENS[row], shared=shared))


def test_plain_discriminator_and_navigator_are_linear_relu_linear():
    for net in (Discriminator(NAMES, 6, hidden=5, out=1, highway=False), Navigator(NAMES, 6, hidden=5, out=4)):
        for row in range(3):
            expected = layer(net.second, row, F.relu(layer(net.first, row, TOKENS[row])))
            torch.testing.assert_close(net(TOKENS)[row], expected)


def test_slices_use_the_weights_of_the_layers_they_name():
    net = Navigator(NAMES, 6, hidden=5, out=4)
    chosen = net(TOKENS, torch.tensor([2, 2, 0]))
    for place, row in enumerate([2, 2, 0]):
        torch.testing.assert_close(chosen[place], layer(net.second, row, F.relu(layer(net.first, row, TOKENS[place]))))


def test_first_weights_are_uniform_as_those_of_nn_linear():
    weight = LayeredLinear([str(i) for i in range(50)], 16, 16, seed=0, role="test").weight
    assert weight.abs().max() <= 0.25
    assert weight.std().item() == pytest.approx(0.25 / 3**0.5, rel=0.02)
    assert abs(weight.mean()) < 5e-3


def test_reversed_gradient_is_minus_the_gradient():
    x = torch.randn(5, requires_grad=True)
    reverse_gradient(x).pow(3).sum().backward()
    torch.testing.assert_close(x.grad, -3 * x.detach().square())
    torch.testing.assert_close(reverse_gradient(x), x)


def loss_of(method: str, query: torch.Tensor, key: torch.Tensor, **options):
    alignment = alignattn.Alignment(method, weight=1.0, **options)
    alignment.record(query, key, name="layer")
    loss = alignment.loss()
    return loss, alignment.matcher


def tokens(n: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, 3, n, 6, requires_grad=True), (torch.randn(2, 3, n, 6) + 0.5).requires_grad_()


def test_paper_gan_is_the_sum_over_heads_of_the_printed_game():
    query, key = tokens()
    loss, matcher = loss_of("gan", query, key, preset="paper")
    net = matcher.banks[0]["discriminator"]
    naive = 0.0
    for b in range(2):
        for h in range(3):
            real = torch.sigmoid(highway_mlp(net, 0, query[b, h])).log().mean()
            fake = (1 - torch.sigmoid(highway_mlp(net, 0, key[b, h]))).log().mean()
            naive = naive + (real + fake) / 2  # two samples
    torch.testing.assert_close(loss, naive)


def navigate(net: Navigator, x: torch.Tensor) -> torch.Tensor:
    return layer(net.second, 0, F.relu(layer(net.first, 0, x)))


def test_paper_ct_is_the_sum_over_heads_of_the_printed_cost():
    query, key = tokens()
    loss, matcher = loss_of("ct", query, key, preset="paper")
    critic, navigator = matcher.banks[0]["critic"], matcher.banks[0]["navigator"]
    naive = 0.0
    for b in range(2):
        for h in range(3):
            q, k = query[b, h], key[b, h]
            cost = 1 - F.cosine_similarity(highway_mlp(critic, 0, q)[:, None], highway_mlp(critic, 0, k)[None], dim=-1)
            scores = navigate(navigator, q) @ navigate(navigator, k).T
            both = (scores.softmax(1) * cost).sum(1).mean() + (scores.softmax(0) * cost).sum(0).mean()
            naive = naive + both / 2 / 2
    torch.testing.assert_close(loss, naive)


def test_released_gan_moves_the_keys_alone():
    query, key = tokens()
    loss, matcher = loss_of("gan", query, key, preset="released")
    net = matcher.banks[0]["discriminator"]
    real = F.logsigmoid(highway_mlp(net, 0, query, shared=True)).mean()
    fake = F.logsigmoid(-highway_mlp(net, 0, key, shared=True)).mean()
    torch.testing.assert_close(loss, real + fake)
    loss.backward()
    assert query.grad is None or query.grad.abs().sum() == 0
    assert key.grad.abs().sum() > 0


def test_released_ct_carries_the_heads_at_each_position_and_its_navigator_ascends():
    query, key = tokens()
    loss, matcher = loss_of("ct", query, key, preset="released")
    critic, navigator = matcher.banks[0]["critic"], matcher.banks[0]["navigator"]
    naive = 0.0
    for b in range(2):
        for i in range(5):
            q, k = query[b, :, i], key[b, :, i]  # (heads, d)
            one, two = (F.normalize(highway_mlp(critic, 0, x), dim=-1) for x in (q, k))
            cost = (one[:, None] - two[None]).norm(dim=-1)
            scores = F.normalize(navigate(navigator, q), dim=-1) @ F.normalize(navigate(navigator, k), dim=-1).T
            both = (scores.softmax(1) * cost).sum(1).mean() + (scores.softmax(0) * cost).sum(0).mean()
            naive = naive + both / 2 / (2 * 5)
    torch.testing.assert_close(loss, naive, rtol=1e-4, atol=1e-5)
    parameters = list(navigator.parameters())
    ascending = torch.autograd.grad(loss, parameters, retain_graph=True)
    for ours, plain in zip(ascending, torch.autograd.grad(naive, parameters), strict=True):
        torch.testing.assert_close(ours, -plain, rtol=1e-3, atol=1e-5)


def test_released_ot_is_the_debiased_divergence_of_geomloss():
    query, key = tokens()
    loss, _ = loss_of("ot", query * 0.1, key * 0.1, preset="released", max_iterations=20_000, tolerance=1e-6)
    divergence = SamplesLoss("sinkhorn", p=2, blur=0.05, scaling=0.99, debias=True)
    expected = divergence((query * 0.1).flatten(0, 1).detach(), (key * 0.1).flatten(0, 1).detach()).mean()
    torch.testing.assert_close(loss.detach(), expected, rtol=2e-3, atol=1e-5)


def test_released_counts_padding_and_the_others_do_not():
    query, key = tokens()
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[0, 2:] = False
    for preset, differs in (("released", False), ("paper", True), ("stable", True)):
        values = []
        for masks in ((), (mask, mask)):
            alignment = alignattn.Alignment("gan", weight=1.0, preset=preset)
            alignment.record(query, key, *masks, name="layer")
            values.append(alignment.loss())
        assert (values[0] != values[1]) == differs, preset


def test_common_scale_of_stable_makes_it_blind_to_scale_and_origin():
    query, key = (t.detach() for t in tokens())
    for method in ("gan", "ct"):
        here, _ = loss_of(method, query, key)
        there, _ = loss_of(method, 7 * query + 3, 7 * key + 3)
        torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-5)
        literal, _ = loss_of(method, query, key, preset="paper", reduction="mean")
        assert abs(literal - here) > 1e-3


@pytest.mark.parametrize("tokens", [1, 7, 24, 97])
def test_products_over_tokens_in_parts_are_those_of_the_whole(tokens):
    from alignattn.matching import linear

    x, y = torch.randn(3, tokens, 5, dtype=torch.float64), torch.randn(3, tokens, 2, dtype=torch.float64)
    expected = torch.einsum("lti,lto->lio", x, y)
    for parts in {1, *(linear._parts(3, tokens, torch.device(device)) for device in linear.PARTS)}:
        assert tokens % parts == 0 and 1 <= parts <= 512 // 3
        torch.testing.assert_close(linear._in_parts(x, y, parts), expected)


def test_the_gradient_of_a_layered_linear_map_is_written_out_right():
    from alignattn.matching import linear

    given = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 5, 3), (2, 3, 4), (2, 1, 4))]
    torch.autograd.gradcheck(linear._Linear.apply, given)
