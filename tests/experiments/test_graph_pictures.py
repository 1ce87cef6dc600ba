"""What pictures of graph attention are drawn from, held against PyG's own layers and naive loops."""

import json
from pathlib import Path

import pytest
import torch

from alignattn.errors import DataError
from alignattn.experiments import graph_pictures
from alignattn.experiments import recipe as recipes
from alignattn.experiments.training import Place, train

pytest.importorskip("torch_geometric", reason="pip install 'alignattn[graph]'")
pytest.importorskip("matplotlib", reason="pip install 'alignattn[plot]'")
pytest.importorskip("sklearn", reason="pip install 'alignattn[demo]'")

from alignattn.diagnosis.neighbours import neighbourhood_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch_geometric")

ROOT = Path(__file__).parent.parent.parent
CPU = Place(device="cpu")


@pytest.fixture(scope="module")
def trained():
    settings = {"seeds": 1, "train": {"steps": 8}, "align": {"methods": ["soft", "mmd"], "weights": [50.0]}}
    recipe = recipes.load("blocks", [settings])
    return {run.method: train(run, CPU) for run in recipe.runs()}


def test_the_node_is_the_one_that_alignment_changed_most(trained):
    told = graph_pictures.tell(trained)
    soft, aligned = (one.model.plain().eval() for one in trained.values())
    graph = trained["soft"].task.graph
    inputs = (graph.features, graph.edges)
    changes = {}
    for node in graph.test.tolist():
        for layer, name in enumerate(("first", "second")):
            first, second = (neighbourhood_of(model, inputs, layer, node) for model in (soft, aligned))
            for head, (one, other) in enumerate(zip(first.weights, second.weights, strict=True)):
                place = node, name, head
                changes[place] = (float((one - other).abs().sum() / 2), first, second)
    few = {place: found for place, found in changes.items() if 4 <= len(found[1].nodes) <= 10}
    most, first, second = few[told["node"], told["layer"], told["head"]]
    assert most == pytest.approx(max(found[0] for found in few.values()), abs=1e-5)
    assert told["neighbours"] == first.nodes and told["node"] in first.nodes
    assert told["classes_around"] == graph.labels[first.nodes].tolist()
    for title, found in zip(("soft", "mmd"), (first, second), strict=True):
        assert told["attention"][title] == pytest.approx(found.weights[told["head"]].tolist(), abs=6e-4)
    mean = sum(found[0] for found in changes.values()) / len(changes)
    assert told["changed"] == pytest.approx({"most": 100 * most, "mean": 100 * mean}, abs=0.01)
    uneven = [float((f.weights[p[2]] - 1 / len(f.nodes)).abs().sum() / 2) for p, (_, f, _) in changes.items()]
    assert told["uneven"]["soft"] == pytest.approx(100 * sum(uneven) / len(uneven), abs=0.01)
    assert told["uneven"]["mmd"] != told["uneven"]["soft"]


def test_embeddings_are_those_of_the_hidden_layer_with_their_classes(trained):
    told = graph_pictures.tell(trained)
    graph = trained["soft"].task.graph
    count = min(graph_pictures.NODES, len(graph.test))
    assert len(told["classes"]) == count
    for title, one in trained.items():
        whole = one.model.plain().eval().embeddings(graph.features, graph.edges).detach()
        shown = torch.tensor(told["embeddings"][title])
        assert shown.shape == (count, whole.shape[1])
        distance = torch.cdist(shown, whole[graph.test])
        nearest = graph.test[distance.argmin(1)]
        assert float(distance.min(1).values.max()) < 0.05  # rounded to hundredths
        assert (graph.labels[nearest] == torch.tensor(told["classes"])).float().mean() > 0.95


def test_a_graph_without_a_node_to_show_is_refused(trained, monkeypatch):
    monkeypatch.setattr(graph_pictures, "NEIGHBOURS", range(100, 110))
    with pytest.raises(DataError, match="No test node has 100 to 109 neighbours"):
        graph_pictures.tell(trained)


def test_the_tool_stores_what_both_pictures_are_drawn_from(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import graph_pictures as tool

    file = tmp_path / "blocks.json"
    tool.main(["blocks", "gan", "--weight", "0.5", "--steps", "3", "--out", str(file)])
    told = json.loads(file.read_text())
    assert list(told["runs"]) == ["soft", "gan 0.5"] == list(told["attention"])
    assert told["recipe"]["train"]["steps"] == 3 and told["inputs"] and str(tmp_path) not in file.read_text()
    first, second = graph_pictures.draw(told).values()
    assert [axis.get_title().split(":")[0] for axis in second] == ["soft", "gan 0.5"]
    assert [axis.get_title() for axis in first] == ["soft", "gan 0.5"]


def test_the_stored_pictures_of_cora_are_small_and_what_the_guide_says_of_them():
    file = ROOT / "results" / "pictures" / "cora.json"
    assert file.stat().st_size < 300_000
    told = json.loads(file.read_text())
    page = " ".join((ROOT / "docs" / "guide" / "pictures.md").read_text().split())
    for figure in (told["changed"]["most"], told["changed"]["mean"], *told["uneven"].values()):
        assert f"{figure} %" in page
    assert all(len(rows) == len(told["classes"]) for rows in told["embeddings"].values())
    for weights in told["attention"].values():
        assert sum(weights) == pytest.approx(1, abs=0.01)
