"""Planetoid's format on files made here, what can be broken about them, and the real graphs where they are."""

import os
import pickle
import re
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from alignattn.datasets.graphs import PARTS, Blocks, block_graph, graph_files, load_graph
from alignattn.errors import ConfigError, DataError

LABELLED, KNOWN, TEST = 6, 520, 4  # of which 500 after the labelled ones are for validation
ORDER = [523, 520, 522, 521]  # in which the test nodes stand in the files


@pytest.fixture
def folder(tmp_path):
    """A set like Planetoid's: node i has the features i + 1 and 1, class i % 2, and is tied to i + 1."""
    np = pytest.importorskip("numpy")
    sparse = pytest.importorskip("scipy.sparse")
    pytest.importorskip("torch_geometric", reason="pip install 'alignattn[graph]'")

    def features(nodes):
        return sparse.csr_matrix(np.array([[i + 1, 1, 0] for i in nodes], dtype=np.float32))

    def classes(nodes):
        return np.eye(2, dtype=np.int32)[[i % 2 for i in nodes]]

    graph = defaultdict(list)
    for i in range(KNOWN + TEST - 1):
        graph[i].append(i + 1)
        graph[i + 1].append(i)
    graph[0] += [1, 0]  # twice, and a self-loop
    values = {"graph": graph}
    for part, nodes in {"": range(LABELLED), "all": range(KNOWN), "t": ORDER}.items():
        values |= {f"{part}x": features(nodes), f"{part}y": classes(nodes)}
    for name in ("x", "tx", "allx", "y", "ty", "ally", "graph"):
        (tmp_path / f"ind.cora.{name}").write_bytes(pickle.dumps(values[name]))
    (tmp_path / "ind.cora.test.index").write_text("".join(f"{i}\n" for i in ORDER))
    return tmp_path


def test_nodes_come_back_in_the_order_of_their_names(folder):
    graph = load_graph("cora", folder)
    expected = torch.tensor([[i + 1.0, 1.0, 0.0] for i in range(KNOWN + TEST)])
    torch.testing.assert_close(graph.features, expected / expected.sum(1, keepdim=True))
    assert graph.labels.tolist() == [i % 2 for i in range(KNOWN + TEST)] and graph.classes == 2
    assert graph.train.tolist() == list(range(LABELLED))
    assert graph.validation.tolist() == list(range(LABELLED, LABELLED + 500))
    assert graph.test.tolist() == sorted(ORDER)
    pairs = set(map(tuple, graph.edges.T.tolist()))
    chain = {(i, i + 1) for i in range(KNOWN + TEST - 1)}
    assert pairs == chain | {(b, a) for a, b in chain} and graph.edges.shape[1] == len(pairs)


@pytest.mark.parametrize("nested", ["planetoid", "Cora/raw", "planetoid/Cora/raw"])
def test_files_are_found_as_pyg_lays_them_out(folder, nested):
    (folder / nested).mkdir(parents=True)
    for part in PARTS:
        (folder / f"ind.cora.{part}").rename(folder / nested / f"ind.cora.{part}")
    assert load_graph("cora", folder).sha256 == graph_files("cora", folder)
    assert set(graph_files("cora", folder)) == {f"cora/ind.cora.{part}" for part in PARTS}


def test_a_missing_file_is_named(folder):
    (folder / "ind.cora.ty").unlink()
    with pytest.raises(DataError, match=r"lacks ind\.cora\.ty\. .*Planetoid\(folder, 'Cora'\)"):
        load_graph("cora", folder)
    with pytest.raises(DataError, match=r"lacks ind\.pubmed\.x, "):
        graph_files("pubmed", folder)
    with pytest.raises(DataError, match="is no folder"):
        load_graph("cora", folder / "nowhere")
    with pytest.raises(ConfigError, match=r"Unknown graph 'cor'.*Did you mean 'cora'"):
        load_graph("cor", folder)


@pytest.mark.parametrize("part", PARTS)
def test_a_broken_file_is_named(folder, part):
    file = folder / f"ind.cora.{part}"
    file.write_bytes(b"no " + file.read_bytes()[:20])
    with pytest.raises(DataError, match=rf"ind\.cora\.{part} is truncated or corrupt"):
        load_graph("cora", folder)


def test_files_that_don_t_fit_together_are_refused(folder):
    (folder / "ind.cora.test.index").write_text("1\n2\n")
    (folder / "ind.cora.ally").write_bytes((folder / "ind.cora.y").read_bytes())
    with pytest.raises(DataError, match=r"ind\.cora\.\* in .* don't fit together"):
        load_graph("cora", folder)


def cut(folder):
    file = folder / "ind.cora.test.index"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))


def named_twice(folder):
    (folder / "ind.cora.test.index").write_text("523\n520\n522\n522\n")


def empty(folder):
    (folder / "ind.cora.test.index").write_text("")


def of_another(folder):
    rows = pickle.loads((folder / "ind.cora.tx").read_bytes())
    (folder / "ind.cora.x").write_bytes(pickle.dumps(rows[[0, 1, 2, 3, 0, 1]]))


def known(folder):
    (folder / "ind.cora.test.index").write_text("523\n520\n522\n5\n")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (cut, "test.index has 3 rows and ind.cora.ty 4"),
        (named_twice, "test.index names a node twice"),
        (empty, "test.index"),
        (of_another, "ind.cora.x is not how ind.cora.allx begins"),
        (known, "names nodes that are in ind.cora.allx"),
    ],
)
def test_files_that_would_put_nodes_in_the_place_of_others_are_refused(folder, spoil, said):
    load_graph("cora", folder)
    spoil(folder)
    with pytest.raises(DataError, match=re.escape(said)):
        load_graph("cora", folder)


PAPER = {  # table tab:gat_data; the last is of edges once self-loops and double ones are gone
    "cora": (2708, 1433, 7, 140, 5429, 5278),
    "citeseer": (3327, 3703, 6, 120, 4732, 4552),
    "pubmed": (19717, 500, 3, 60, 44338, 44324),
}


@pytest.mark.parametrize("name", PAPER)
def test_the_real_graphs_have_the_paper_s_counts(name):
    pytest.importorskip("torch_geometric", reason="pip install 'alignattn[graph]'")
    place = os.environ.get("ALIGNATTN_PLANETOID")
    if not place or not Path(place).is_dir():
        pytest.skip("set ALIGNATTN_PLANETOID to the folder with Planetoid's ind.* files")
    nodes, features, classes, train, edges, different = PAPER[name]
    graph = load_graph(name, place)
    assert graph.features.shape == (nodes, features) and graph.classes == classes
    assert [len(part) for part in (graph.train, graph.validation, graph.test)] == [train, 500, 1000]
    raw = pickle.loads(next(Path(place).rglob(f"ind.{name}.graph")).read_bytes(), encoding="latin1")
    assert sum(map(len, raw.values())) == 2 * edges and graph.edges.shape[1] == 2 * different
    sums = graph.features.sum(1)
    assert ((sums - 1).abs() < 1e-4).logical_or(sums == 0).all()
    assert graph.labels[graph.train].bincount().tolist() == [train // classes] * classes
    parts = [set(part.tolist()) for part in (graph.train, graph.validation, graph.test)]
    assert len(set.union(*parts)) == train + 1500


def test_blocks_have_the_neighbours_and_words_they_are_asked_for():
    blocks = Blocks(nodes=2000, classes=4, inside=6.0, outside=3.0, words=80, own=0.2, other=0.05, train=5)
    graph = block_graph(blocks)
    source, target = graph.edges
    same = graph.labels[source] == graph.labels[target]
    assert same.sum().item() / 2000 == pytest.approx(6.0, rel=0.05)
    assert (~same).sum().item() / 2000 == pytest.approx(3.0, rel=0.05)
    assert (source != target).all()
    assert set(map(tuple, graph.edges.T.tolist())) == set(map(tuple, graph.edges.flip(0).T.tolist()))
    said = graph.features > 0
    own = torch.arange(80)[None] % 4 == graph.labels[:, None]
    assert said[own].float().mean().item() == pytest.approx(0.2, rel=0.05)
    assert said[~own].float().mean().item() == pytest.approx(0.05, rel=0.05)
    assert graph.labels[graph.train].bincount().tolist() == [5] * 4
    nodes = torch.cat([graph.train, graph.validation, graph.test])
    assert sorted(nodes.tolist()) == list(range(2000))


def test_blocks_follow_their_seed():
    one, again, other = (block_graph(Blocks(seed=seed)) for seed in (1, 1, 2))
    assert one.sha256 == again.sha256 != other.sha256


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"nodes": 5}, "data.nodes"),
        ({"own": 1.5}, "data.own"),
        ({"inside": 1e4}, "data.inside"),
        ({"train": 150}, "leave no nodes"),
        ({"validation": 270}, "leave no nodes"),
    ],
)
def test_blocks_that_cannot_be_are_refused(settings, told):
    with pytest.raises(ConfigError, match=told):
        Blocks(**settings)
