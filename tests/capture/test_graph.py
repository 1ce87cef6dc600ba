"""PyG's graph attention: what is captured rebuilds its weights, and no node meets one of another graph."""

import copy
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch
from tiny import seeded
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import alignattn
from alignattn.capture import QueryKey, Tap
from alignattn.diagnosis.attention import attention_of
from alignattn.errors import CaptureError, UnsupportedModelError

pytest.importorskip("torch_geometric", reason="needs torch-geometric: pip install 'alignattn[graph]'")
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.nn import GATConv, GATv2Conv, HeteroConv, Sequential, TransformerConv, models
from torch_geometric.utils import softmax, to_torch_coo_tensor, to_torch_csr_tensor

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch_geometric"),
    pytest.mark.filterwarnings("ignore:.*(Sparse (CSR|CSC) tensor support|Sparse invariant checks).*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*(do not get updated|always_call=True).*:UserWarning"),
]

CONVOLUTIONS = [GATConv, GATv2Conv, TransformerConv]
every_convolution = pytest.mark.parametrize("convolution", CONVOLUTIONS)
NODES, WIDTH, HEADS, D = 9, 6, 3, 4


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def some_edges(nodes: int = NODES, targets: int | None = None, count: int = 24, seed: int = 0) -> Tensor:
    """The last node is left alone; two edges are there twice."""
    generator = torch.Generator().manual_seed(seed)
    sides = [torch.randint(most - 1, (count,), generator=generator) for most in (nodes, targets or nodes)]
    edges = torch.stack(sides)
    return torch.cat([edges, edges[:, :2]], 1)


class Net(nn.Module):
    """Two convolutions, one after another."""

    def __init__(self, convolution: type[nn.Module], **options: Any) -> None:
        super().__init__()
        options = {"heads": HEADS, **options}
        self.first = convolution(WIDTH, D, **options)
        self.second = convolution(options["heads"] * D, 5, heads=2, concat=False)

    def forward(
        self, x: Tensor, edge_index: Any, batch: Tensor | None = None, edge_attr: Tensor | None = None
    ) -> Tensor:
        return self.second(self.first(x, edge_index, edge_attr).relu(), edge_index)


def records(model: nn.Module, *args: Any, cross: bool = True, **kwargs: Any) -> list[QueryKey]:
    found: list[QueryKey] = []
    tap = Tap(model, watch=found.append, cross=cross)
    model(*args, **kwargs)
    tap.remove()
    return found


def rebuilt(conv: nn.Module, record: QueryKey, edge_attr: Tensor | None = None) -> Tensor:
    """Attention weights [edges, h] from what was captured, by the formula of the layer."""
    assert record.edges is not None
    query, key = (side[0].transpose(0, 1) for side in (record.query, record.key))  # (nodes, h, d)
    query, key = query[record.edges[0]], key[record.edges[1]]
    edge = 0.0
    if edge_attr is not None:
        edge = conv.lin_edge(edge_attr).view(-1, conv.heads, conv.out_channels)
    if isinstance(conv, TransformerConv):
        logits = (query * (key + edge)).sum(-1) / conv.out_channels**0.5
    elif isinstance(conv, GATv2Conv):
        logits = (nn.functional.leaky_relu(query + key + edge, conv.negative_slope) * conv.att).sum(-1)
    else:
        of_edge = 0.0 if edge_attr is None else (edge * conv.att_edge).sum(-1)
        logits = nn.functional.leaky_relu(query.sum(-1) + key.sum(-1) + of_edge, conv.negative_slope)
    return softmax(logits, record.edges[0], num_nodes=record.query.shape[2])


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one head": {"heads": 1},
    "mean of heads": {"concat": False},
    "no bias": {"bias": False},
    "edge features": {"edge_dim": 2},
    "no self-loops": {"add_self_loops": False},
    "residual": {"residual": True},
    "shared weights": {"share_weights": True},
    "turned round": {"flow": "target_to_source"},
}
LACKS = {
    GATConv: {"shared weights"},
    GATv2Conv: set[str](),
    TransformerConv: {"no self-loops", "residual", "shared weights"},
}
CASES = [(c, o) for c in CONVOLUTIONS for o in OPTIONS if o not in LACKS[c]]


@pytest.mark.parametrize(("convolution", "options"), CASES)
@pytest.mark.parametrize("form", ["edges", "coo", "csr"])
def test_weights_rebuilt_from_what_is_captured_are_those_of_the_layer(convolution, options, form):
    if form != "edges" and options in ("edge features", "turned round"):
        pytest.skip("PyG takes these with edges alone")
    conv = seeded(lambda: convolution(WIDTH, D, **({"heads": HEADS} | OPTIONS[options])))
    edges = some_edges()
    edge_attr = random(edges.shape[1], 2, seed=5) if options == "edge features" else None
    given = edges
    if form != "edges":  # which add edges up that are there twice
        to = to_torch_coo_tensor if form == "coo" else to_torch_csr_tensor
        given = to(edges.unique(dim=1), size=(NODES, NODES)).transpose(0, 1)
        given = given.coalesce() if form == "coo" else given.to_sparse_csr()
    x = random(NODES, WIDTH, seed=1)
    (record,) = records(conv, x, given, edge_attr)
    _, (index, weights) = conv(x, given, edge_attr, return_attention_weights=True)
    if edge_attr is not None and convolution is not TransformerConv:  # self-loops have the mean of what comes in
        seen: list[Tensor] = []
        handle = conv.lin_edge.register_forward_hook(lambda _, args, __: seen.append(args[0]))
        conv(x, given, edge_attr)
        handle.remove()
        edge_attr = seen[0]
    torch.testing.assert_close(rebuilt(conv, record, edge_attr), weights)
    if form == "edges":
        key_at = 0 if conv.flow == "source_to_target" else 1
        assert torch.equal(record.edges[0], index[1 - key_at]) and torch.equal(record.edges[1], index[key_at])


@every_convolution
@pytest.mark.parametrize("pair", [True, False])
def test_two_kinds_of_nodes_are_cross_attention(convolution, pair):
    kinds = (WIDTH, 5) if pair or convolution is not GATConv else WIDTH
    conv = seeded(
        lambda: convolution(
            kinds, D, heads=HEADS, **({} if convolution is TransformerConv else {"add_self_loops": False})
        )
    )
    nodes = random(NODES, WIDTH, seed=1), random(4, 5 if kinds != WIDTH else WIDTH, seed=2)
    edges = some_edges(NODES, 4)
    (record,) = records(conv, nodes, edges)
    assert record.query.shape == (1, HEADS, 4, D) and record.key.shape == (1, HEADS, NODES, D)
    torch.testing.assert_close(rebuilt(conv, record), conv(nodes, edges, return_attention_weights=True)[1][1])
    assert records(conv, nodes, edges, cross=False) == []


@every_convolution
def test_a_sampler_s_nodes_and_the_first_of_them_are_one_kind(convolution):
    conv = seeded(lambda: convolution(WIDTH, D, heads=HEADS))
    x = random(NODES, WIDTH, seed=1)
    (record,) = records(conv, (x, x[:4]), some_edges(NODES, 4), cross=False)
    assert record.query.shape[2] == 4 and record.key.shape[2] == NODES


def test_a_convolution_that_nobody_attends_in_has_no_queries():
    conv = GATConv((WIDTH, WIDTH), D, add_self_loops=False)
    with pytest.raises(UnsupportedModelError, match=r"\(x, None\), and so has no queries"):
        records(conv, (random(NODES, WIDTH), None), some_edges(NODES, 4), size=(NODES, 4))


@every_convolution
def test_training_without_weight_is_plain_training_to_the_last_bit(convolution):
    x, edges = random(NODES, WIDTH), some_edges()
    found = []
    for aligned in (False, True):
        model = seeded(lambda: Net(convolution, dropout=0.3))
        if aligned:
            alignment = alignattn.align(model, "ct", weight=0.0)
        torch.manual_seed(3)
        output = model(x, edges)
        loss = output.square().sum() + (alignment.loss() if aligned else 0.0)
        loss.backward()
        found.append([output.detach(), *[p.grad for p in model.parameters()]])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@every_convolution
def test_eval_mode_captures_nothing_and_changes_nothing(convolution):
    model = seeded(lambda: Net(convolution)).eval()
    x, edges = random(NODES, WIDTH), some_edges()
    before = model(x, edges)
    hooks = {name: dict(vars(module)) for name, module in model.named_modules()}
    found: list[QueryKey] = []
    tap = Tap(model, watch=found.append)
    assert torch.equal(model(x, edges), before) and found == []
    assert torch.equal(copy.deepcopy(model).train()(x, edges), before) and found == []  # a copy is a plain model
    tap.remove()
    assert torch.equal(model(x, edges), before)
    for name, module in model.named_modules():
        assert all(not value for key, value in vars(module).items() if "_hooks" in key), name
        assert vars(module).keys() == hooks[name].keys()


def a_batch(seed: int = 0) -> tuple[list[Data], Batch]:
    """Graphs of 4, 1 and 6 nodes."""
    graphs = [
        Data(
            x=random(nodes, WIDTH, seed=seed + nodes),
            edge_index=some_edges(nodes, count=8) if nodes > 1 else torch.zeros(2, 0, dtype=torch.long),
        )
        for nodes in (4, 1, 6)
    ]
    return graphs, Batch.from_data_list(graphs)


class OnData(Net):
    """Takes a Data object, or a dictionary with the same, by a name that might be taken for the vector's."""

    def forward(self, batch: Any) -> Tensor:
        return super().forward(batch["x"], batch["edge_index"])


def call(model: nn.Module, how: str, batch: Batch) -> Tensor:
    if how == "position":
        return model(batch.x, batch.edge_index, batch.batch)
    if how == "keyword":
        return model(batch.x, edge_index=batch.edge_index, batch=batch.batch)
    return model(batch if how == "data" else batch.to_dict())


@every_convolution
@pytest.mark.parametrize("how", ["position", "keyword", "data", "dictionary"])
@pytest.mark.parametrize(
    "options", [{"method": "mmd"}, {"method": "ct"}, {"method": "ct", "matched_over": "neighbourhoods"}]
)
def test_each_graph_of_a_batch_is_a_problem_of_its_own(convolution, how, options):
    """The term of a batch is the mean of the terms of its graphs, each given to the model alone."""
    graphs, batch = a_batch()
    model = seeded(lambda: (OnData if how in ("data", "dictionary") else Net)(convolution))
    alignment = alignattn.align(model, **options, weight=1.0, recentre=False, until_met=False)
    call(model, how, batch)
    together = alignment.loss().item()
    alone = []
    for graph in graphs:
        call(model, how, Batch.from_data_list([graph]))
        alone.append(alignment.loss().item())
    assert together == pytest.approx(sum(alone) / len(alone), rel=1e-4, abs=1e-6)


@every_convolution
@pytest.mark.parametrize("matched_over", ["all", "neighbourhoods"])
def test_no_gradient_goes_from_one_graph_to_another(convolution, matched_over):
    _, batch = a_batch()
    model = seeded(lambda: convolution(WIDTH, D, heads=HEADS))
    found = []
    for change in (0.0, 1.0):
        x = batch.x.clone()
        x[5:] += change * random(6, WIDTH, seed=8)  # the nodes of the third graph
        x.requires_grad_()
        holder = Net(convolution)
        holder.first, holder.second = copy.deepcopy(model), nn.Identity()
        holder.forward = lambda x, edge_index, batch, net=holder: net.first(x, edge_index)
        alignment = alignattn.align(
            holder, "ct", weight=1.0, matched_over=matched_over, recentre=False, until_met=False
        )
        holder(x, batch.edge_index, batch.batch)
        alignment.loss().backward()
        found.append(x.grad)
    torch.testing.assert_close(found[0][:5], found[1][:5])
    assert not torch.allclose(found[0][5:], found[1][5:])


@every_convolution
@pytest.mark.parametrize("method", ["gan", "ot", "ct", "mmd"])
def test_the_order_of_nodes_changes_nothing(convolution, method):
    x, edges = random(NODES, WIDTH), some_edges()
    order = torch.randperm(NODES, generator=torch.Generator().manual_seed(1))
    values = []
    for nodes, index in ((x, edges), (x[order], order.argsort()[edges])):
        model = seeded(lambda: Net(convolution))
        alignment = alignattn.align(model, method, weight=1.0)
        model(nodes, index)
        values.append(alignment.loss().item())
    assert values[0] == pytest.approx(values[1], rel=1e-4)


@every_convolution
@pytest.mark.parametrize("options", [{}, {"matched_over": "neighbourhoods"}, {"stream": "layer"}, {"max_tokens": 5}])
@pytest.mark.parametrize("generator", ["model", "projections"])
def test_alignment_brings_gradients_to_the_projections(convolution, options, generator):
    model = seeded(lambda: Net(convolution))
    alignment = alignattn.align(model, "ct", weight=1.0, generator=generator, **options)
    x = random(NODES, WIDTH).requires_grad_()
    model(x, some_edges())
    alignment.loss().backward()
    makers = {
        GATConv: ["lin.weight", "att_src", "att_dst"],
        GATv2Conv: ["lin_l.weight", "lin_r.weight"],
        TransformerConv: ["lin_query.weight", "lin_key.weight"],
    }[convolution]
    of = dict(model.named_parameters())
    for layer in ("first", "second"):
        assert all(of[f"{layer}.{name}"].grad.abs().sum() > 0 for name in makers)
    reached = {name for name, parameter in of.items() if parameter.grad is not None and parameter.grad.abs().sum() > 0}
    stops = generator == "projections"
    assert (x.grad is None) == stops
    biases = {f"{layer}.{name.replace('weight', 'bias')}" for layer in ("first", "second") for name in makers}
    own = {f"{layer}.{name}" for layer in ("first", "second") for name in makers}
    assert not stops or own <= reached <= own | biases


@every_convolution
def test_projections_get_what_they_would_from_detached_inputs(convolution):
    """The gradient that stops there is the one of a layer whose input was a constant."""
    x, edges = random(NODES, WIDTH), some_edges()
    found = []
    for generator in ("model", "projections"):
        conv = seeded(lambda: convolution(WIDTH, D, heads=HEADS))
        alignment = alignattn.align(conv, "mmd", weight=1.0, generator=generator)
        conv(x, edges)
        alignment.loss().backward()
        found.append([p.grad for p in conv.parameters() if p.grad is not None and p.grad.abs().sum() > 0])
    assert len(found[0]) >= 2
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@every_convolution
def test_auto_sees_the_task_s_gradient_beside_alignment_s(convolution):
    """Its share is |alignment's| over |the task's|, of queries and keys: measured here by two backward passes."""
    x, edges = random(NODES, WIDTH), some_edges()
    for apart in (True, False):
        model = seeded(lambda: Net(convolution))
        alignment = alignattn.align(model, "mmd", weight=0.5, until_met=False, recentre=False, layers=[0])
        sides: list[Tensor] = []
        keep = alignment._tap._watch
        alignment._tap._watch = lambda record, sides=sides, keep=keep: (
            sides.extend([record.query, record.key]),
            keep(record),
        )
        loss = model(x, edges).square().mean()
        term = alignment.loss()
        if apart:  # hooks see these gradients too, so another model is looked at
            of_both = [torch.autograd.grad(of, sides, retain_graph=True) for of in (term, loss)]
            norms = [torch.cat([gradient.flatten() for gradient in some]).norm() for some in of_both]
    (loss + term).backward()
    alignment.advance()
    assert alignment.meter.read()["alignment_share"] == pytest.approx((norms[0] / norms[1]).item(), rel=1e-3)


class Checkpointed(Net):
    def forward(self, x: Tensor, edge_index: Any, batch: Tensor | None = None) -> Tensor:
        x = checkpoint(self.first, x, edge_index, use_reentrant=False).relu()
        return checkpoint(self.second, x, edge_index, use_reentrant=False)


@every_convolution
def test_checkpointed_convolutions_train_as_others(convolution):
    x, edges = random(NODES, WIDTH), some_edges()
    batch = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 1])
    edges = edges[:, batch[edges[0]] == batch[edges[1]]]
    found = []
    for checkpoints, stream in ((False, None), (True, None), (True, "layer")):
        model = seeded(partial(Checkpointed if checkpoints else Net, convolution))
        alignment = alignattn.align(model, "ct", weight=1.0, stream=stream)
        for _ in range(2):
            loss = model(x, edges, batch).square().mean()
            (loss + alignment.loss()).backward()
        found.append([p.grad for p in model.parameters()])
    for other in found[1:]:
        for one, same in zip(found[0], other, strict=True):
            torch.testing.assert_close(one, same)


class TestFreeShifts:
    @staticmethod
    def shifted(convolution: type[nn.Module], **options: Any) -> tuple[Tensor, Tensor]:
        """Eval outputs before and after updates in which keys were recentred; the model itself did not learn."""
        model = seeded(lambda: Net(convolution, **options)).double()
        x, edges = random(NODES, WIDTH).double(), some_edges()
        edge_attr = random(edges.shape[1], 2).double() if options else None
        before = model.eval()(x, edges, None, edge_attr)
        model.train()
        alignment = alignattn.align(model, "mmd", weight=1.0, recentre=True)
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        model(x, edges, None, edge_attr)
        alignment.loss().backward()
        optimizer.step()
        query, key = (
            (side[0].mean(1)) for r in records(model, x, edges, None, edge_attr)[:1] for side in (r.query, r.key)
        )
        after = model.eval()(x, edges, None, edge_attr)
        torch.testing.assert_close(after, before)
        return query, key

    @pytest.mark.parametrize("options", [{}, {"edge_dim": 2}])
    def test_transformerconv_s_keys_are_moved_to_its_queries_and_no_output_changes(self, options):
        query, key = self.shifted(TransformerConv, **options)
        torch.testing.assert_close(query, key, rtol=1e-6, atol=1e-6)

    @pytest.mark.parametrize("convolution", [GATConv, GATv2Conv])
    def test_others_are_left_where_they_are(self, convolution):
        query, key = self.shifted(convolution)
        assert not torch.allclose(query, key, atol=1e-3)

    def test_a_leaky_relu_feels_a_shift(self):
        """Why: softmax is blind to a constant, and what comes before it is not."""
        conv = seeded(lambda: GATv2Conv(WIDTH, D, heads=HEADS, add_self_loops=False)).double()
        x, edges = random(NODES, WIDTH).double(), some_edges()
        before = conv(x, edges, return_attention_weights=True)[1][1]
        with torch.no_grad():
            conv.lin_l.bias += 1.0
        assert not torch.allclose(conv(x, edges, return_attention_weights=True)[1][1], before, atol=1e-3)


@every_convolution
def test_weights_along_edges_are_what_attention_of_shows(convolution):
    model = seeded(lambda: Net(convolution))
    x, edges = random(NODES, WIDTH), some_edges()
    shown = attention_of(model, {"x": x, "edge_index": edges}, 0)
    index, weights = model.eval().first(x, edges, return_attention_weights=True)[1]
    expected = torch.zeros(NODES, NODES, HEADS).index_put_((index[1], index[0]), weights.detach(), accumulate=True)
    torch.testing.assert_close(shown, expected.permute(2, 0, 1)[None])


@every_convolution
def test_heads_are_diagnosed(convolution):
    model = seeded(lambda: Net(convolution))
    x, edges = random(40, WIDTH), some_edges(40, count=90)
    found = alignattn.diagnose(model, [{"x": x, "edge_index": edges}])
    assert len({head.layer for head in found.heads}) == 2


def test_pyg_s_own_models_attach():
    for v2 in (False, True):
        model = seeded(lambda v2=v2: models.GAT(WIDTH, 8, num_layers=3, out_channels=5, heads=2, v2=v2, dropout=0.5))
        alignment = alignattn.align(model, "ct")
        assert "graph attention" in alignment.summary() and "3 attention modules" in alignment.summary()
        (model(random(NODES, WIDTH), some_edges()).sum() + alignment.loss()).backward()


def test_sequential_tells_the_names_of_its_arguments():
    conv = GATConv(WIDTH, D)
    model = Sequential("x, edge_index, batch", [(conv, "x, edge_index -> x"), nn.ReLU()])
    _, batch = a_batch()
    (record,) = records(model, batch.x, batch.edge_index, batch.batch)
    assert record.unpacked().query.shape == (3, 1, 6, D)


def test_relations_between_kinds_of_nodes():
    own, other = ("paper", "cites", "paper"), ("author", "writes", "paper")
    convolutions = {own: GATConv(WIDTH, D), other: GATConv((WIDTH, WIDTH), D, add_self_loops=False)}
    model = seeded(lambda: HeteroConv(convolutions))
    x = {"paper": random(NODES, WIDTH), "author": random(4, WIDTH, seed=1)}
    edges = {own: some_edges(), other: some_edges(4, NODES)}
    assert [r.key.shape[2] for r in records(model, x, edges)] == [NODES, 4]
    assert [r.key.shape[2] for r in records(model, x, edges, cross=False)] == [NODES]


def test_batches_of_graphs_with_several_kinds_of_nodes_are_told_apart_by_kind_and_refused_between_two():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = GATConv(WIDTH, D)

        def forward(self, data: Any) -> Tensor:
            return self.conv(data["paper"].x, data["paper", "cites", "paper"].edge_index)

    graph = HeteroData()
    graph["paper"].x = random(NODES, WIDTH)
    graph["paper", "cites", "paper"].edge_index = some_edges()
    graph["author"].x = random(3, WIDTH)
    (record,) = records(Model(), Batch.from_data_list([graph, graph]))
    assert record.segments.tolist() == [[0] * NODES + [1] * NODES]
    (record,) = records(Model(), Batch.from_data_list([graph]))
    assert record.key.shape[2] == NODES and record.segments is None

    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = GATConv((WIDTH, WIDTH), D, add_self_loops=False)

        def forward(self, data: Any) -> Tensor:
            return self.conv((data["author"].x, data["paper"].x), data["author", "writes", "paper"].edge_index)

    graph["author", "writes", "paper"].edge_index = some_edges(3, NODES)
    with pytest.raises(UnsupportedModelError, match="several kinds of nodes"):
        records(Between(), Batch.from_data_list([graph, graph]))
    (record,) = records(Between(), Batch.from_data_list([graph]))
    assert record.key.shape[2] == 3


@pytest.mark.parametrize("how", ["made anew", "one for both"])
def test_vectors_of_gatconv_that_are_made_anew_or_tied(how):
    """Queries and keys are those of the same vectors as plain parameters."""

    def made(changed: bool) -> nn.Module:
        conv = seeded(lambda: GATConv(WIDTH, D, heads=2))
        with torch.no_grad():
            conv.att_dst.copy_(conv.att_src if how == "one for both" else conv.att_dst)
        if changed and how == "one for both":
            conv.att_dst = conv.att_src
        elif changed:
            nn.utils.parametrizations.weight_norm(conv, "att_src")
            nn.utils.parametrizations.weight_norm(conv, "att_dst")
        return conv

    (expected,), (found,) = (records(made(changed), random(NODES, WIDTH), some_edges()) for changed in (False, True))
    torch.testing.assert_close(found.query, expected.query)
    torch.testing.assert_close(found.key, expected.key)


def test_nodes_whose_graph_is_not_known_are_refused_and_leaving_them_out_helps():
    class Pooled(Net):
        def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
            x = self.first(x, edge_index)
            return self.second(x[:4], edge_index[:, (edge_index < 4).all(0)])

    _, batch = a_batch()
    model = Pooled(GATConv)
    alignment = alignattn.align(model, "mmd")
    with pytest.raises(CaptureError, match=r"second ran on 4 nodes .* the model's batch is of 11"):
        model(batch.x, batch.edge_index, batch.batch)
    alignment.detach()
    alignment = alignattn.align(model, "mmd", layers="first")
    model(batch.x, batch.edge_index, batch.batch)
    assert alignment.loss().isfinite()


def test_two_kinds_of_nodes_in_a_batch_of_graphs_are_refused():
    """Also where there are equally many of both, and the batch might be of either."""

    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = GATConv((WIDTH, WIDTH), D)

        def forward(self, x: Tensor, y: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
            return self.conv((x, y), edge_index)

    given = random(NODES, WIDTH), random(NODES, WIDTH, seed=1), some_edges()
    with pytest.raises(CaptureError, match="nodes of different graphs are never matched"):
        records(Between(), *given, torch.arange(NODES) // 5)
    assert len(records(Between(), *given, torch.zeros(NODES, dtype=torch.long))) == 1  # which is one graph
    assert records(Between(), *given, torch.arange(NODES) // 5, cross=False) == []


def test_compiled_convolutions_are_refused():
    model = Net(GATConv)
    alignattn.align(model, "mmd")
    with pytest.raises(UnsupportedModelError, match=r"Leave out torch\.compile"):
        torch.compile(model, backend="eager")(random(NODES, WIDTH), some_edges())


def test_the_problem_of_many_nodes_is_thinned_to_a_stated_number():
    model = seeded(lambda: Net(GATConv))
    alignment = alignattn.align(model, "ot", max_tokens=64)
    seen: list[int] = []
    forward = alignment.matcher.forward
    alignment.matcher.forward = lambda query, *rest: (seen.append(query.shape[3]), forward(query, *rest))[1]
    model(random(500, WIDTH), some_edges(500, count=900))
    alignment.loss().backward()
    assert set(seen) == {64}


def test_pyg_is_imported_by_nobody_who_does_not_use_it():
    script = (
        "import sys, torch, alignattn; m = torch.nn.TransformerEncoderLayer(8, 2); alignattn.align(m, 'mmd');"
        "assert not any(name.startswith('torch_geometric') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
