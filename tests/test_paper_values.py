"""The paper's figures, as files: every cell is there, is a percentage, and stands under a name that is known."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

import alignattn

FOLDER = Path(alignattn.__file__).parent / "paper_values"
GLUE_METRICS = {
    "mrpc": {"accuracy"},
    "cola": {"matthews"},
    "rte": {"accuracy"},
    "mnli": {"accuracy"},
    "qnli": {"accuracy"},
    "qqp": {"accuracy"},
    "sst2": {"accuracy"},
    "stsb": {"pearson"},
    "squad1": {"exact_match", "f1"},
    "squad2": {"exact_match", "f1"},
}
DOMAIN_COLUMNS = {"snli", "mnli", "qqp", "twitter_ppdb", "swag", "hellaswag"}
DOMAIN_METHODS = {
    "da": {"soft"},
    "esim": {"soft"},
    "bert-base": {"soft", "gan", "ct"},
    "roberta-base": {"soft", "gan", "ct"},
}


def read(name: str) -> dict[str, Any]:
    return tomllib.loads((FOLDER / name).read_text(encoding="utf-8"))


def cells(table: dict[str, Any], path: str = "") -> list[tuple[str, dict[str, Any]]]:
    """Every innermost table, with where it stands."""
    if not any(isinstance(value, dict) for value in table.values()):
        return [(path, table)]
    assert all(isinstance(value, dict) for value in table.values()), f"{path} holds both cells and values"
    return [cell for key, value in table.items() for cell in cells(value, f"{path}.{key}".lstrip("."))]


@pytest.mark.parametrize("name", ["glue.toml", "domain.toml", "graph.toml"])
def test_every_cell_is_a_percentage(name):
    values = read(name)
    assert values["table"].startswith("Table ") and values["label"].startswith("tab:")
    found = cells(values["cells"])
    assert found
    for path, cell in found:
        assert {"mean"} <= set(cell) <= {"mean", "deviation"}, path
        assert all(isinstance(value, float) for value in cell.values()), path
        assert 0 < cell["mean"] < 100, path
        assert 0 < cell.get("deviation", 0.1) < cell["mean"], path


def test_glue_has_the_four_methods_in_every_column():
    values = read("glue.toml")
    assert set(values) == {"table", "label", "model", "runs", "cells"}
    assert {column: set(metrics) for column, metrics in values["cells"].items()} == GLUE_METRICS
    for metrics in values["cells"].values():
        for methods in metrics.values():
            assert set(methods) == {"soft", "gan", "ot", "ct"}
            assert [name for name, cell in methods.items() if "deviation" not in cell] == ["soft"]
    assert len(cells(values["cells"])) == 4 * 12


def test_domain_has_every_column_of_every_model():
    values = read("domain.toml")
    assert set(values) == {"table", "label", "models", "cells"}
    assert set(values["models"]) == set(values["cells"]) == set(DOMAIN_METHODS)
    for model, columns in values["cells"].items():
        assert set(columns) == DOMAIN_COLUMNS
        for metrics in columns.values():
            assert set(metrics) == {"accuracy", "ece"}
            assert all(set(methods) == DOMAIN_METHODS[model] for methods in metrics.values())
    assert len(cells(values["cells"])) == 2 * 6 * (1 + 1 + 3 + 3)


def test_graph_has_the_three_graphs_and_no_ot():
    values = read("graph.toml")
    assert set(values) == {"table", "label", "model", "runs", "cells"} and values["runs"] == 5
    assert set(values["cells"]) == {"cora", "citeseer", "pubmed"}
    for column, metrics in values["cells"].items():
        (methods,) = metrics.values()
        assert set(methods) == {"soft", "gan", "ct"}
        assert [name for name, cell in methods.items() if "deviation" not in cell] == ["soft"]
        # "alignment attention consistently improves ...", and CT "performs better than" GAN
        assert methods["soft"]["mean"] < methods["gan"]["mean"] < methods["ct"]["mean"], column


def test_a_cell_is_found_by_name():
    glue, domain = read("glue.toml")["cells"], read("domain.toml")["cells"]
    assert glue["mrpc"]["accuracy"]["gan"] == {"mean": 87.5, "deviation": 0.3}
    assert glue["squad2"]["f1"]["soft"] == {"mean": 82.07}
    assert domain["roberta-base"]["twitter_ppdb"]["ece"]["ct"] == {"mean": 9.40}


def test_alignment_helps_in_every_glue_column_as_the_text_says():
    for path, methods in (
        (f"{column}.{metric}", methods)
        for column, metrics in read("glue.toml")["cells"].items()
        for metric, methods in metrics.items()
    ):
        soft = methods["soft"]["mean"]
        assert all(methods[name]["mean"] > soft for name in ("gan", "ot", "ct")), path


def test_alignment_helps_accuracy_in_and_out_of_domain_as_the_text_says():
    for model in ("bert-base", "roberta-base"):
        for column, metrics in read("domain.toml")["cells"][model].items():
            accuracy = metrics["accuracy"]
            assert min(accuracy["gan"]["mean"], accuracy["ct"]["mean"]) > accuracy["soft"]["mean"], (model, column)
