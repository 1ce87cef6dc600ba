"""Nodes of one graph, classified by a GAT of two layers: as the paper trains it on Cora, CiteSeer and PubMed.

Every step is an epoch over the whole graph; all nodes are seen, and labels of few. Models of many seeds are trained as
one (seeds_at_once.py).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from alignattn.capture import QueryKey
from alignattn.datasets.graphs import PLANETOID, Blocks, NodeGraph, block_graph, graph_files, load_graph
from alignattn.diagnosis.mmd import of_samples
from alignattn.errors import ConfigError, DataError, unknown
from alignattn.experiments.tasks.measuring import classification
from alignattn.experiments.tasks.task import Measured, SeedsAtOnce, Watch
from alignattn.models.gat import GATs, GraphInput


@dataclass(frozen=True, kw_only=True)
class GraphData:
    """Which of Planetoid's graphs, with its public split."""

    name: str  # cora, citeseer or pubmed

    def __post_init__(self) -> None:
        if self.name not in PLANETOID:
            raise unknown("graph", self.name, PLANETOID)


@dataclass(frozen=True, kw_only=True)
class GraphModel:
    """The GAT: ELU after the first layer, LeakyReLU of slope 0.2 in the attention, Glorot's first weights."""

    heads: int = 8
    width: int = 8  # of each head of the first layer
    output_heads: int = 1  # of the second, averaged
    dropout: float = 0.6  # of both layers' inputs and of attention coefficients
    value_dropout: float = 0.0  # of the projected features that attention gathers: in GAT's code, not in its text

    def __post_init__(self) -> None:
        for name in ("heads", "width", "output_heads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model.{name} must be at least 1, got {getattr(self, name)}.")
        for name in ("dropout", "value_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"model.{name} must be in [0, 1), got {getattr(self, name)}.")


@dataclass(frozen=True, kw_only=True)
class GraphTraining:
    """Adam, the whole graph in every step, early stopping by validation loss and accuracy (early.py)."""

    steps: int = 2000  # epochs at most
    patience: int = 100  # epochs without a good one, after which training ends
    rate: float = 0.005  # Adam's
    l2: float = 5e-4  # weight of the penalty, half the squared length of all parameters

    epochs: ClassVar[float | None] = None  # steps say it
    batch: ClassVar[int] = 1  # the graph

    def __post_init__(self) -> None:
        for name in ("steps", "patience", "rate"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"train.{name} must be > 0, got {value}.")
        if not (self.l2 >= 0 and math.isfinite(self.l2)):
            raise ConfigError(f"train.l2 must be >= 0, got {self.l2}.")

    def steps_for(self, samples: int) -> int:
        """Epochs at most."""
        return self.steps


class NodeClassification(SeedsAtOnce):
    """Which class a node is of."""

    data_settings: ClassVar[type] = GraphData
    model_settings: ClassVar[type] = GraphModel
    train_settings: ClassVar[type] = GraphTraining

    def read(self, data_dir: Path | None) -> None:
        self.graph = self.make_graph(data_dir)
        self.input = GraphInput(self.graph.features.to(self.device), self.graph.edges.to(self.device))
        self.edges = self.input.edges.row, self.input.edges.column
        graph = self.graph
        self.nodes = {
            "train": graph.train.to(self.device),
            "validation": graph.validation.to(self.device),
            "test": graph.test.to(self.device),
        }
        self.labels = graph.labels.to(self.device)

    def make_graph(self, data_dir: Path | None) -> NodeGraph:
        """The graph, read or made."""
        return load_graph(self.data.name, _given(self.data, data_dir))

    @classmethod
    def inputs(cls, data: Any, model: Any, data_dir: Path | None) -> Mapping[str, str]:
        return graph_files(data.name, _given(data, data_dir))

    @property
    def samples(self) -> int:
        return 1

    @property
    def evaluation_samples(self) -> int:
        return 1

    def make_models(self, seeds: Sequence[int]) -> GATs:
        m, graph = self.model, self.graph
        return GATs(
            graph.features.shape[1],
            graph.classes,
            seeds=seeds,
            heads=m.heads,
            width=m.width,
            output_heads=m.output_heads,
            dropout=m.dropout,
            value_dropout=m.value_dropout,
        ).to(self.device)

    def losses(self, models: nn.Module, watch: Watch | None = None) -> Tensor:
        return self._loss(models(self.input, watch), "train")

    def validate(self, models: nn.Module) -> tuple[Tensor, Tensor]:
        logits, nodes = models(self.input), self.nodes["validation"]
        right = logits[:, nodes].argmax(-1) == self.labels[nodes]
        return self._loss(logits, "validation"), right.double().mean(1)

    def keep_only(self, models: nn.Module, places: Sequence[int]) -> None:
        assert isinstance(models, GATs)
        models.keep_only(places)

    def only(self, models: nn.Module, place: int) -> nn.Module:
        assert isinstance(models, GATs)
        return models.only(place)

    def evaluate(self, model: nn.Module) -> Measured:
        """On test nodes: accuracy, calibration, and how far apart their keys and queries are."""
        records = self.queries_and_keys(model)
        nodes = self.nodes["test"]
        measured = classification(model(self.input)[0, nodes].softmax(-1), self.labels[nodes])
        unit, plain, apart = 0.0, {}, 0.0
        for record in records:
            plain[record.name] = of_samples(record)[0][0]  # one value a head
            apart += float(of_samples(record, without_own=True)[0].sum())
            unit += float(of_samples(record, bandwidth=1.0)[0].sum())
        measured.metrics |= {
            "mmd": sum(float(heads.sum()) for heads in plain.values()),
            "mmd_apart": apart,
            "mmd_unit": unit,
        }
        measured.details["mmd"] = {name: [round(v, 6) for v in heads.tolist()] for name, heads in plain.items()}
        return measured

    def queries_and_keys(self, model: nn.Module) -> list[QueryKey]:
        """Of the test nodes, layer by layer, of the model of one seed."""
        found: list[QueryKey] = []
        nodes = self.nodes["test"]

        def watch(layer: str, query: Tensor, key: Tensor) -> None:
            found.append(QueryKey(query[:, :, nodes].detach(), key[:, :, nodes].detach(), name=layer))

        with torch.no_grad():
            model(self.input, watch)
        return found

    def _loss(self, logits: Tensor, part: str) -> Tensor:
        """Cross-entropy of each seed."""
        nodes = self.nodes[part]
        label = self.labels[nodes].expand(len(logits), -1)
        return F.cross_entropy(logits[:, nodes].mT, label, reduction="none").mean(1)


class BlockClassification(NodeClassification):
    """The same on a graph that is made of a seed."""

    data_settings: ClassVar[type] = Blocks

    def make_graph(self, data_dir: Path | None) -> NodeGraph:
        return block_graph(self.data)

    @classmethod
    def inputs(cls, data: Any, model: Any, data_dir: Path | None) -> Mapping[str, str]:
        return block_graph(data).sha256


def _given(data: GraphData, data_dir: Path | None) -> Path:
    if data_dir is None:
        raise DataError(f"Where is {PLANETOID[data.name]}? Name the folder that holds it: --data-dir FOLDER.")
    return data_dir
