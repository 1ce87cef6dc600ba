"""What a node attends to, held against the weights that PyG's convolutions return themselves."""

import pytest
import torch
from torch import Tensor, nn

from alignattn.diagnosis.neighbours import neighbourhood_of
from alignattn.errors import ConfigError
from alignattn.models.gat import GAT, GATs, GraphInput

pytest.importorskip("torch_geometric", reason="needs torch-geometric: pip install 'alignattn[graph]'")
from torch_geometric.nn import GATConv, GATv2Conv, TransformerConv

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch_geometric")

NODES, WIDTH = 12, 5
EDGES = torch.tensor([[1, 2, 3, 3, 7, 0, 2, 9], [0, 0, 0, 0, 0, 5, 5, 5]])  # 3 to 0 twice; nobody to 8


class Net(nn.Module):
    """A convolution between layers that do something else, with dropout that must be off."""

    def __init__(self, convolution: type[nn.Module], **options: object) -> None:
        super().__init__()
        self.attend = convolution(WIDTH, 4, heads=3, dropout=0.9, **options)
        self.classify = nn.Linear(12, 2)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None) -> Tensor:
        return self.classify(self.attend(x, edge_index, edge_attr))


def expected(model: Net, node: int, *inputs: Tensor) -> dict[int, Tensor]:
    """By PyG: weights [h] of each node that `node` attends to."""
    with torch.no_grad():
        (source, target), weights = model.eval().attend(*inputs, return_attention_weights=True)[1]
    found: dict[int, Tensor] = {}
    for edge in range(len(source)):
        if target[edge] == node:
            key = int(source[edge])
            found[key] = found.get(key, torch.zeros(3)) + weights[edge]
    return found


@pytest.mark.parametrize("edge_dim", [None, 2])
@pytest.mark.parametrize("convolution", [GATConv, GATv2Conv, TransformerConv])
def test_neighbours_and_weights_are_those_the_convolution_returns(convolution, edge_dim):
    torch.manual_seed(0)
    model = Net(convolution, edge_dim=edge_dim).train()
    inputs = [torch.randn(NODES, WIDTH), EDGES] + ([torch.randn(EDGES.shape[1], 2)] if edge_dim else [])
    for node in (0, 5, -12):
        found = neighbourhood_of(model, tuple(inputs), 0, node)
        assert model.training and model.attend.training
        truth = expected(model, node % NODES, *inputs)
        model.train()
        assert found.nodes == sorted(truth) and len(truth) >= 3
        torch.testing.assert_close(found.weights, torch.stack([truth[one] for one in found.nodes], 1))
        torch.testing.assert_close(found.weights.sum(1), torch.ones(3))


def test_a_node_without_edges_attends_to_itself_where_loops_are_added_and_else_to_nobody():
    torch.manual_seed(0)
    inputs = (torch.randn(NODES, WIDTH), EDGES)
    alone = neighbourhood_of(Net(GATConv), inputs, "attend", 8)
    assert alone.nodes == [8] and torch.equal(alone.weights, torch.ones(3, 1))
    nobody = neighbourhood_of(Net(TransformerConv), inputs, "attend", 8)
    assert nobody.nodes == [] and nobody.weights.shape == (3, 0)


def test_our_gat_of_many_seeds_tells_the_same_coefficients_and_embeddings_as_pyg():
    torch.manual_seed(0)
    features = torch.rand(NODES, WIDTH)
    models = GATs(WIDTH, 3, seeds=(0, 4), heads=2, output_heads=2).eval()
    graph = GraphInput(features, torch.unique(EDGES, dim=1))
    with torch.no_grad():
        ours, embedded = models.attention(graph), models.embeddings(graph)
    for place in range(2):
        plain = models.plain(place)
        assert isinstance(plain, GAT)
        inputs = (features, torch.unique(EDGES, dim=1))
        torch.testing.assert_close(embedded[place], plain.embeddings(*inputs), atol=1e-5, rtol=1e-5)
        for layer, name in enumerate(("first", "second")):
            for node in (0, 5, 8):
                own = graph.edges.row == node
                theirs = neighbourhood_of(plain, inputs, layer, node)
                weights = dict(zip(graph.edges.column[own].tolist(), ours[name][place][:, own].T, strict=True))
                assert sorted(weights) == theirs.nodes
                torch.testing.assert_close(torch.stack([weights[one] for one in theirs.nodes], 1), theirs.weights)


def test_what_has_no_neighbourhood_is_refused():
    inputs = (torch.randn(NODES, WIDTH), EDGES)
    with pytest.raises(ConfigError, match=r"node=12: attend ran on 12 nodes that attend, 0 to 11"):
        neighbourhood_of(Net(GATConv), inputs, 0, 12)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 1)
    with pytest.raises(ConfigError, match=r"has no neighbourhoods.*attention_of\(\) tells"):
        neighbourhood_of(encoder, torch.randn(2, 4, 8), 0, 0)
