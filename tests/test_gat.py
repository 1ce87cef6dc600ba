"""Networks of many seeds against PyG's GATConv, one seed after another."""

import pytest
import torch

from alignattn.models.gat import GATs, GraphInput
from alignattn.models.sparsity import Pattern

NODES, FEATURES, CLASSES = 30, 12, 4


@pytest.fixture
def graph():
    generator = torch.Generator().manual_seed(0)
    features = torch.rand(NODES, FEATURES, generator=generator)
    features = features * (features < 0.4)
    features[3] = 0  # a node without features
    edges = torch.randint(0, NODES - 1, (2, 80), generator=generator)  # the last node has no neighbour
    edges = torch.unique(torch.cat([edges, edges.flip(0)], 1), dim=1)
    assert (edges[0] == edges[1]).any()  # self-loops that are there already must not count twice
    return features, edges


@pytest.mark.parametrize("output_heads", [1, 8])
def test_every_seed_computes_what_gatconv_does(graph, output_heads):
    pytest.importorskip("torch_geometric", reason="pip install 'alignattn[graph]'")
    features, edges = graph
    models = GATs(FEATURES, CLASSES, seeds=(0, 5, 7), output_heads=output_heads).eval()
    for parameter in models.parameters():  # biases too are to be something
        torch.nn.init.normal_(parameter, std=0.5)
    logits = models(GraphInput(features, edges))
    weights = torch.randn(logits.shape)
    (logits * weights).sum().backward()
    for place in range(3):
        plain = models.plain(place)
        theirs = plain(features, edges)
        torch.testing.assert_close(logits[place], theirs, atol=1e-5, rtol=1e-5)
        (theirs * weights[place]).sum().backward()
        for ours, layer in ((models.first, plain.first), (models.second, plain.second)):
            gradients = {
                "weight": layer.lin.weight.grad.mT,
                "source": layer.att_src.grad[0],
                "target": layer.att_dst.grad[0],
                "bias": layer.bias.grad,
            }
            for name, gradient in gradients.items():
                torch.testing.assert_close(getattr(ours, name).grad[place], gradient, atol=1e-5, rtol=1e-4)


def test_logits_of_an_edge_are_sums_of_query_and_key(graph):
    pytest.importorskip("torch_geometric", reason="pip install 'alignattn[graph]'")
    features, edges = graph
    models, seen = GATs(FEATURES, CLASSES, seeds=(1,)).eval(), {}
    models(GraphInput(features, edges), lambda layer, query, key: seen.update({layer: (query, key)}))
    _, (with_loops, alpha) = models.plain().first(features, edges, return_attention_weights=True)
    query, key = seen["first"]
    for node in (0, NODES - 1):
        neighbours = with_loops[0][with_loops[1] == node]
        sums = query[0, :, node].sum(-1, keepdim=True) + key[0][:, neighbours].sum(-1)
        expected = torch.nn.functional.leaky_relu(sums, 0.2).softmax(-1)
        torch.testing.assert_close(alpha[with_loops[1] == node].T, expected, atol=1e-5, rtol=1e-5)
    assert seen["second"][0].shape == (1, 1, NODES, CLASSES)


def test_a_seed_is_the_same_whichever_others_it_is_with(graph):
    prepared = GraphInput(*graph)
    alone, among = GATs(FEATURES, CLASSES, seeds=(5,)), GATs(FEATURES, CLASSES, seeds=(0, 5, 7))
    for _ in range(2):  # dropout is on, and goes on from where it was
        torch.testing.assert_close(alone(prepared)[0], among(prepared)[1])
    torch.testing.assert_close(among.eval().only(2)(prepared)[0], among(prepared)[2])
    assert not torch.allclose(among(prepared)[0], among(prepared)[1], atol=1e-2)


def test_dropout_takes_its_share_and_keeps_the_mean(graph):
    models = GATs(FEATURES, CLASSES, seeds=(0, 1), dropout=0.6)
    dropped = models._dropped(torch.ones(2, 20_000))
    assert set(dropped.unique().tolist()) == {0.0, torch.tensor(1.0).div(0.4).item()}
    assert ((dropped == 0).float().mean(-1) - 0.6).abs().max() < 0.02
    assert (dropped[0] != dropped[1]).any()


def test_dropped_values_leave_queries_and_keys_alone(graph):
    prepared = GraphInput(*graph)
    plain, dropping = (GATs(FEATURES, CLASSES, seeds=(0,), dropout=0.0, value_dropout=v) for v in (0.0, 0.5))
    seen = {}
    for name, models in (("plain", plain), ("dropping", dropping)):
        models(prepared, lambda layer, query, key, name=name: seen.update({(name, layer): (query, key)}))
    for ours, theirs in zip(seen["plain", "first"], seen["dropping", "first"], strict=True):
        torch.testing.assert_close(ours, theirs, atol=0, rtol=0)
    assert not torch.allclose(seen["plain", "second"][0], seen["dropping", "second"][0])  # they saw what was gathered
    torch.testing.assert_close(plain.eval()(prepared), dropping.eval()(prepared), atol=0, rtol=0)


def test_first_weights_are_glorot_s():
    models = GATs(1433, 7, seeds=range(20))
    for layer, (inputs, outputs) in ((models.first, (1433, 64)), (models.second, (64, 7))):
        bound = (6 / (inputs + outputs)) ** 0.5
        assert 0.98 * bound < layer.weight.abs().max() <= bound
        assert layer.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.02)
        assert (layer.bias == 0).all()


def test_products_of_copies_are_dense_products():
    generator = torch.Generator().manual_seed(0)
    row, column = torch.tensor([3, 0, 0, 2, 3, 1]), torch.tensor([1, 2, 0, 0, 4, 3])
    pattern = Pattern(row, column, (4, 5))
    values = torch.randn(3, 6, generator=generator, requires_grad=True)
    dense = torch.randn(3, 5, 2, generator=generator, requires_grad=True)
    matrix = torch.zeros(3, 4, 5).index_put((torch.arange(3)[:, None], pattern.row, pattern.column), values)
    torch.testing.assert_close(pattern.product(values, dense), matrix @ dense)
    upstream = torch.randn(3, 4, 2, generator=generator)
    ours = torch.autograd.grad((pattern.product(values, dense) * upstream).sum(), (values, dense))
    theirs = torch.autograd.grad((matrix @ dense * upstream).sum(), (values, dense))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)
    assert (row[pattern.order] == pattern.row).all()
