"""Graphs of a batch, however a model is told of them: the term is that of a loop over graphs, one at a time."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from tiny import seeded
from torch import Tensor, nn

import alignattn
from alignattn.capture.tap import Tap
from alignattn.errors import AlignmentError, CaptureError, ShapeError, UnsupportedModelError

pytest.importorskip("torch_geometric", reason="needs torch-geometric: pip install 'alignattn[graph]'")
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GATConv, TransformerConv

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch_geometric")

WIDTH, SIZES = 6, (4, 1, 6)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def a_graph(nodes: int) -> Data:
    """A ring, both ways; the node of one alone has no edge."""
    place = torch.arange(nodes)
    ring = torch.stack([place, (place + 1) % nodes])
    edges = torch.cat([ring, ring.flip(0)], 1) if nodes > 1 else torch.zeros(2, 0, dtype=torch.long)
    return Data(x=random(nodes, WIDTH, seed=nodes), edge_index=edges)


GRAPHS = [a_graph(nodes) for nodes in SIZES]
NODES = sum(SIZES)
INDEX = torch.repeat_interleave(torch.arange(3), torch.tensor(SIZES))  # by hand, not by PyG


class Net(nn.Module):
    """Two convolutions, called with whatever `read` makes nodes and edges of."""

    def __init__(self, convolution: type[nn.Module] = GATConv) -> None:
        super().__init__()
        self.first = convolution(WIDTH, 4, heads=3)
        self.second = convolution(12, 5, heads=2)

    def run(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


class ByName(Net):
    def forward(self, x: Tensor, edge_index: Tensor, graph_ids: Tensor, y: Tensor | None = None) -> Tensor:
        return self.run(x, edge_index)


class ByPosition(Net):
    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        return self.run(inputs[0], inputs[1])


class Wrapped(Net):
    def forward(self, given: Any) -> Tensor:
        return self.run(*given) if isinstance(given, list) else self.run(given[0], given[1])


class ByMember(Net):
    def forward(self, given: Any) -> Tensor:
        return self.run(given.x, given.edge_index)


class ByKey(Net):
    def forward(self, given: dict[str, Any]) -> Tensor:
        return self.run(given["inputs"]["x"], given["inputs"]["edge_index"])


class ByBounds(Net):
    def forward(self, x: Tensor, edge_index: Tensor, ptr: Tensor) -> Tensor:
        return self.run(x, edge_index)


@dataclass
class Inputs:
    x: Tensor
    edge_index: Tensor
    which: Tensor


class Named(NamedTuple):
    x: Tensor
    edge_index: Tensor
    which: Tensor


def followed(graphs: list[Data]) -> Data:
    """As `follow_batch=["x"]` makes it, without its `batch`."""
    batch = Batch.from_data_list(graphs, follow_batch=["x"])
    return Data(x=batch.x, edge_index=batch.edge_index, x_batch=batch.x_batch)


def bounded(graphs: list[Data]) -> Data:
    batch = Batch.from_data_list(graphs)
    return Data(x=batch.x, edge_index=batch.edge_index, ptr=batch.ptr)


# how: the model, and how it is called with nodes, edges and the graph of each node
WAYS = {
    "another name": (ByName, lambda m, x, e, i: m(x, e, graph_ids=i)),
    "by position": (ByName, lambda m, x, e, i: m(x, e, i)),
    "of 32 bits": (ByName, lambda m, x, e, i: m(x, e, i.int())),
    "no names at all": (ByPosition, lambda m, x, e, i: m(x, e, i)),
    "keyword nobody names": (ByPosition, lambda m, x, e, i: m(x, e, idx=i)),
    "tuple": (Wrapped, lambda m, x, e, i: m((x, e, i))),
    "dataclass": (ByMember, lambda m, x, e, i: m(Inputs(x, e, i))),
    "named tuple": (ByMember, lambda m, x, e, i: m(Named(x, e, i))),
    "namespace": (ByMember, lambda m, x, e, i: m(SimpleNamespace(x=x, edge_index=e, ids=i))),
    "nested": (ByKey, lambda m, x, e, i: m({"inputs": {"x": x, "edge_index": e, "batch_idx": i}})),
    "bounds": (ByBounds, lambda m, x, e, i: m(x, e, torch.cat([torch.zeros(1).long(), i.bincount().cumsum(0)]))),
}


def aligned(model: nn.Module, method: str = "mmd") -> alignattn.Alignment:
    return alignattn.align(model, method, weight=1.0, recentre=False, until_met=False)


def whole() -> tuple[Tensor, Tensor]:
    batch = Batch.from_data_list(GRAPHS)
    return batch.x, batch.edge_index


def mean_of_each_alone(kind: type[nn.Module], convolution: type[nn.Module], method: str) -> float:
    """The loop over graphs: nothing tells of any batch."""

    class Alone(kind):  # type: ignore[misc, valid-type]
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.run(x, edge_index)

    model = seeded(lambda: Alone(convolution))
    alignment = aligned(model, method)
    terms = []
    for graph in GRAPHS:
        model(graph.x, graph.edge_index)
        terms.append(alignment.loss().item())
    return sum(terms) / len(terms)


@pytest.mark.parametrize("method", ["mmd", "ct"])
@pytest.mark.parametrize("convolution", [GATConv, TransformerConv])
@pytest.mark.parametrize("way", WAYS)
def test_however_the_vector_is_called_the_term_is_that_of_each_graph_alone(way, convolution, method):
    kind, call = WAYS[way]
    model = seeded(lambda: kind(convolution))
    alignment = aligned(model, method)
    call(model, *whole(), INDEX)
    together = alignment.loss().item()
    assert together == pytest.approx(mean_of_each_alone(kind, convolution, method), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("make", [followed, bounded])
def test_a_data_without_batch_tells_by_what_else_it_holds(make):
    model = seeded(ByMember)
    alignment = aligned(model)
    model(make(GRAPHS))
    assert alignment.loss().item() == pytest.approx(mean_of_each_alone(ByMember, GATConv, "mmd"), rel=1e-4)


def test_labels_are_no_graphs():
    """In order, out of order, and all the same: one graph, as without them."""
    x, edges = random(NODES, WIDTH), a_graph(NODES).edge_index  # one ring
    terms = []
    for labels in (None, torch.arange(NODES) // 4, torch.arange(NODES) % 3, torch.zeros(NODES).long()):
        model = seeded(ByPosition)
        alignment = aligned(model)
        model(x, edges, *([] if labels is None else [labels]))
        terms.append(alignment.loss().item())
    assert terms == [terms[0]] * 4
    model = seeded(ByName)  # and beside the vector they are not it
    alignment = aligned(model)
    model(*whole(), INDEX, y=torch.randint(3, (NODES,), generator=torch.Generator().manual_seed(0)))
    assert alignment.loss().item() == pytest.approx(mean_of_each_alone(ByName, GATConv, "mmd"), rel=1e-4)


def test_two_vectors_that_differ_are_refused_and_saying_which_helps():
    coarse = torch.tensor([0, 0, 1])[INDEX]
    model = seeded(ByName)
    alignment = aligned(model)
    with pytest.raises(CaptureError, match=r"Both graph_ids and y may tell .* within alignment\.graphs\(vector\)"):
        model(*whole(), INDEX, y=coarse)
    with alignment.graphs(INDEX):
        model(*whole(), INDEX, y=coarse)
    assert alignment.loss().item() == pytest.approx(mean_of_each_alone(ByName, GATConv, "mmd"), rel=1e-4)


class TestSaidByHand:
    class Silent(Net):
        """Nothing that it is called with tells of graphs."""

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.run(x, edge_index)

    def test_the_term_is_that_of_each_graph_alone_and_only_within(self):
        model = seeded(self.Silent)
        alignment = aligned(model)
        with alignment.graphs(INDEX):
            model(*whole())
        assert alignment.loss().item() == pytest.approx(mean_of_each_alone(Net, GATConv, "mmd"), rel=1e-4)
        terms = []
        for _ in range(2):
            model(*whole())
            terms.append(alignment.loss().item())
            with alignment.graphs(None):
                model(*whole())
            terms.append(alignment.loss().item())
        assert terms == [terms[0]] * 4
        assert terms[0] != pytest.approx(mean_of_each_alone(Net, GATConv, "mmd"), rel=1e-2)

    def test_none_overrules_what_the_arguments_tell(self):
        silent, telling = seeded(self.Silent), seeded(ByName)
        first, second = aligned(silent), aligned(telling)
        silent(*whole())
        with second.graphs(None):
            telling(*whole(), INDEX)
        assert second.loss().item() == first.loss().item()

    def test_graphs_out_of_order_are_told_apart_too(self):
        order = torch.randperm(NODES, generator=torch.Generator().manual_seed(1))
        x, edges = whole()
        model = seeded(self.Silent)
        alignment = aligned(model)
        with alignment.graphs(INDEX[order]):
            model(x[order], order.argsort()[edges])
        assert alignment.loss().item() == pytest.approx(mean_of_each_alone(Net, GATConv, "mmd"), rel=1e-4)

    def test_what_was_said_is_forgotten_after_an_error(self):
        model = seeded(self.Silent)
        alignment = aligned(model)
        with pytest.raises(RuntimeError, match="of the user"), alignment.graphs(INDEX):
            raise RuntimeError("of the user")
        model(*whole())
        assert alignment.loss().isfinite()

    def test_what_cannot_be_is_refused(self):
        alignment = aligned(seeded(self.Silent))
        for wrong in (INDEX.float(), INDEX[None], INDEX > 0):
            with pytest.raises(ShapeError, match=r"takes whole numbers \[nodes\]"), alignment.graphs(wrong):
                pass
        with alignment.graphs(INDEX[:5]), pytest.raises(CaptureError, match="the model's batch is of 5"):
            alignment._tap.model(*whole())
        encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 1)
        for other in (alignattn.Alignment("mmd"), alignattn.align(encoder, "mmd")):
            with pytest.raises(AlignmentError, match="attached to a model with graph attention"), other.graphs(INDEX):
                pass


def test_behind_a_pooling_layer_a_vector_of_any_name_is_an_error():
    class Pooled(Net):
        def forward(self, x: Tensor, edge_index: Tensor, ids: Tensor) -> Tensor:
            x = self.first(x, edge_index)
            return self.second(x[:4], edge_index[:, (edge_index < 4).all(0)])

    model = seeded(Pooled)
    aligned(model)
    with pytest.raises(CaptureError, match=r"second ran on 4 nodes .* the model's batch is of 11"):
        model(*whole(), INDEX)


def test_two_batches_in_one_pass_have_each_its_own_vector():
    """As PyG's PairData has them, of other sizes or of the same; one graph behind two, too."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = GATConv(WIDTH, 4, heads=2)

        def forward(self, *of_pairs: Tensor) -> None:
            for x, edge_index, _ in zip(*[iter(of_pairs)] * 3, strict=True):
                self.conv(x, edge_index)

    def of(*sizes: int) -> tuple[Tensor, Tensor, Tensor]:
        batch = Batch.from_data_list([a_graph(nodes) for nodes in sizes])
        return batch.x, batch.edge_index, batch.batch

    for first, second in (((5, 7), (7, 5)), ((5, 7), (8, 9)), ((6, 6), (12,))):
        model = seeded(Pair)
        alignment = aligned(model)
        alone = []
        for nodes in (*first, *second):
            model(*of(nodes))
            alone.append(alignment.loss().item())
        model(*of(*first), *of(*second))
        sides = [sum(alone[:2]) / 2, sum(alone[2:]) / len(second)]
        assert alignment.loss().item() == pytest.approx(sum(sides) / 2, rel=1e-4)


def test_a_vector_that_edges_cross_is_no_batch_of_that_convolution():
    class ByRelation(Net):
        def forward(self, x: Tensor, within: Tensor, across: Tensor, node_type: Tensor) -> Tensor:
            return self.second(self.first(x, within).relu(), across)

    kinds = torch.tensor([0, 0, 0, 1, 1, 1])
    within, across = torch.tensor([[0, 1, 3, 4], [1, 2, 4, 5]]), torch.tensor([[0, 1, 2], [3, 4, 5]])
    model = seeded(ByRelation)
    seen = []
    Tap(model, watch=lambda record: seen.append(record.segments), always=True)
    model(random(6, WIDTH), within, across, kinds)
    assert seen[0].tolist() == [kinds.tolist()] and seen[1] is None


@pytest.mark.parametrize("given", ["permutation", "mask", "features"])
def test_what_is_called_batch_and_is_none_does_not_cut_a_graph(given):
    class Misnamed(Net):
        def forward(self, batch: Tensor, edge_index: Tensor, x: Tensor | None = None) -> Tensor:
            return self.run(batch if x is None else x, edge_index)

    x, edges = random(NODES, WIDTH), a_graph(NODES).edge_index
    other = {
        "permutation": torch.randperm(NODES, generator=torch.Generator().manual_seed(0)),
        "mask": torch.arange(NODES) > 4,
    }
    terms = []
    for inputs in ((x, edges), (other[given], edges, x) if given in other else (x.clone(), edges)):
        model = seeded(Misnamed)
        alignment = aligned(model)
        model(*inputs)
        terms.append(alignment.loss().item())
    assert terms[0] == terms[1] != 0


def test_two_kinds_of_nodes_with_vectors_of_any_name_are_refused():
    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = GATConv((WIDTH, WIDTH), 4, add_self_loops=False)

        def forward(self, x: Tensor, y: Tensor, edge_index: Tensor, *of_nodes: Tensor) -> Tensor:
            return self.conv((x, y), edge_index)

    keys, queries = random(6, WIDTH), random(4, WIDTH, seed=1)
    edges = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 1, 0, 2, 2, 3]])
    ids = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([0, 0, 1, 1])
    model = Between()
    alignment = alignattn.align(model, "mmd", cross=True)
    with pytest.raises(UnsupportedModelError, match="several kinds of nodes"):
        model(keys, queries, edges, *ids)
    model(keys, queries, edges, torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([0, 1, 2, 2]))  # labels: edges cross
    assert alignment.loss().isfinite()
