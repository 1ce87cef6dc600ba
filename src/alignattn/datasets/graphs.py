"""Graphs whose nodes are to be classified: Cora, CiteSeer and PubMed from Planetoid's files, and one made of a seed.

Planetoid's files (`ind.cora.x` and seven more) are read by PyG's own reader: self-loops and double edges are taken out,
the split is the public one. They are pickles: read those that you trust. Features are scaled to rows that sum to one.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from alignattn.datasets.reading import sha256
from alignattn.errors import AlignmentError, ConfigError, DataError, unknown

PLANETOID = {"cora": "Cora", "citeseer": "CiteSeer", "pubmed": "PubMed"}  # ours: PyG's folder
PARTS = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")


@dataclass(frozen=True)
class NodeGraph:
    """One graph, all of it seen in training; only labels are held out."""

    name: str
    features: Float[Tensor, "n f"]
    edges: Int[Tensor, "2 e"]  # source, target; both directions, no self-loops
    labels: Int[Tensor, " n"]
    classes: int
    train: Int[Tensor, " a"]  # nodes
    validation: Int[Tensor, " b"]
    test: Int[Tensor, " c"]
    sha256: Mapping[str, str] = field(default_factory=dict)  # by file


def load_graph(name: str, folder: str | Path) -> NodeGraph:
    """One of Planetoid's graphs from a folder: the files directly there, in `planetoid`, or as PyG lays them out."""
    if name not in PLANETOID:
        raise unknown("graph", name, PLANETOID)
    place = _folder(name, Path(folder))
    digests = {f"{name}/{file.name}": sha256(file) for file in _files(name, place)}
    data = _read(name, place)
    if not torch.isfinite(data.x).all():
        raise DataError(f"{place}/ind.{name}.allx or .tx holds values that are no numbers.")
    train, validation, test = (m.nonzero()[:, 0] for m in (data.train_mask, data.val_mask, data.test_mask))
    return NodeGraph(
        name=name,
        features=_rows_to_one(data.x),
        edges=data.edge_index,
        labels=data.y,
        classes=int(data.y.max()) + 1,
        train=train,
        validation=validation,
        test=test,
        sha256=digests,
    )


def graph_files(name: str, folder: str | Path) -> dict[str, str]:
    """SHA-256 of the files that `load_graph` reads; a DataError names one that is missing."""
    if name not in PLANETOID:
        raise unknown("graph", name, PLANETOID)
    return {f"{name}/{file.name}": sha256(file) for file in _files(name, _folder(name, Path(folder)))}


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """A stochastic block model: nodes of a class know each other more often, and share words more often."""

    nodes: int = 300
    classes: int = 4
    inside: float = 4.0  # neighbours of the same class, on average
    outside: float = 2.0  # and of others
    words: int = 120  # features, each 0 or 1
    own: float = 0.06  # chance of a word of the node's own class
    other: float = 0.03  # and of any other word: noise
    train: int = 10  # labelled nodes a class
    validation: int = 60
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"nodes": 20, "classes": 2, "words": 2, "train": 1, "validation": 1}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ConfigError(f"data.{name} must be at least {value}, got {getattr(self, name)}.")
        for name in ("own", "other"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"data.{name} is a chance, between 0 and 1; got {getattr(self, name)}.")
        of_class = self.nodes // self.classes
        if not (0 <= self.inside <= of_class - 1 and 0 <= self.outside <= self.nodes - of_class):
            raise ConfigError(
                f"data.inside and data.outside must be between 0 and the nodes there are; got {self.inside} and "
                f"{self.outside} of {self.nodes} nodes in {self.classes} classes."
            )
        if self.classes * self.train > of_class * self.classes - self.validation - 1 or self.train >= of_class:
            raise ConfigError(
                "data.train and data.validation leave no nodes to test on: give fewer, or more data.nodes."
            )


def block_graph(blocks: Blocks) -> NodeGraph:
    """The graph that these settings and their seed make, the same on every machine of one torch."""
    generator = torch.Generator().manual_seed(blocks.seed)
    n, c = blocks.nodes, blocks.classes
    labels = torch.arange(n) % c
    same = labels[:, None] == labels[None]
    chance = torch.where(same, blocks.inside / (n / c - 1), blocks.outside / (n - n / c))
    met = (torch.rand(n, n, generator=generator) < chance).triu(1)
    edges = (met | met.T).nonzero().T.contiguous()
    own_words = torch.arange(blocks.words)[None] % c == labels[:, None]
    word = torch.where(own_words, blocks.own, blocks.other)
    features = (torch.rand(n, blocks.words, generator=generator) < word).float()
    order = torch.randperm(n, generator=generator)
    train = torch.cat([order[labels[order] == k][: blocks.train] for k in range(c)])
    rest = order[~torch.isin(order, train)]
    digest = hashlib.sha256(b"".join(t.numpy().tobytes() for t in (features, edges, labels, train, rest))).hexdigest()
    return NodeGraph(
        name="blocks",
        features=_rows_to_one(features),
        edges=edges,
        labels=labels,
        classes=c,
        train=train,
        validation=rest[: blocks.validation],
        test=rest[blocks.validation :],
        sha256={"blocks": digest},
    )


def _rows_to_one(features: Tensor) -> Tensor:
    """As GAT's authors have it; a node without features keeps its zeros."""
    sums = features.sum(1, keepdim=True)
    return torch.where(sums == 0, 0.0, features / torch.where(sums == 0, 1.0, sums))


def _folder(name: str, folder: Path) -> Path:
    """Where the files lie, in that folder."""
    if not folder.is_dir():
        raise DataError(f"{folder} is no folder. Name the one that holds ind.{name}.x and its like.")
    nested = (f"{PLANETOID[name]}/raw", f"{name}/raw")
    places = [folder / part for part in ("", "planetoid", *nested, *(f"planetoid/{part}" for part in nested))]
    return next((place for place in places if any(place.glob(f"ind.{name}.*"))), folder)


def _files(name: str, place: Path) -> list[Path]:
    files = [place / f"ind.{name}.{part}" for part in PARTS]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise DataError(
            f"{place} lacks {', '.join(missing)}. Planetoid has {len(files)} files for {name}; PyG's "
            f"Planetoid(folder, {PLANETOID[name]!r}) downloads them."
        )
    return files


def _read(name: str, place: Path) -> Any:
    try:
        from torch_geometric.io import read_planetoid_data
        from torch_geometric.io.planetoid import read_file
    except ImportError as error:
        raise AlignmentError(f"{PLANETOID[name]} needs torch-geometric: pip install 'alignattn[graph]'") from error
    try:
        _check_parts(name, {part: read_file(str(place), name, part) for part in PARTS if part != "graph"})
        data = read_planetoid_data(str(place), name)
        size = len(data.y)
        if len(data.x) != size or int(data.edge_index.max()) >= size or int(data.edge_index.min()) < 0:
            raise DataError(f"ind.{name}.graph names nodes that ind.{name}.allx and .tx don't have")
        return data
    except Exception as error:  # a broken pickle raises anything
        for part in PARTS:  # which of them it is, the reader does not say
            try:
                read_file(str(place), name, part)
            except Exception as reason:
                file = place / f"ind.{name}.{part}"
                raise DataError(
                    f"{file} is truncated or corrupt: {type(reason).__name__}: {reason}. Download it again."
                ) from reason
        raise DataError(
            f"The files ind.{name}.* in {place} don't fit together: {error}. Download them again."
        ) from error


def _check_parts(name: str, parts: Mapping[str, Tensor]) -> None:
    """Raise unless they are of one graph: PyG's reader would put some nodes in the place of others."""
    test = parts["test.index"]
    counts = {part: len(tensor) for part, tensor in parts.items()}
    for one, other in (("test.index", "ty"), ("tx", "ty"), ("x", "y"), ("allx", "ally")):
        if counts[one] != counts[other]:
            raise DataError(f"ind.{name}.{one} has {counts[one]} rows and ind.{name}.{other} {counts[other]}")
    if counts["ty"] == 0 or counts["y"] == 0:
        raise DataError(f"ind.{name}.{'ty' if counts['ty'] == 0 else 'y'} has no rows")
    if len(test.unique()) != len(test):
        raise DataError(f"ind.{name}.test.index names a node twice")
    if int(test.min()) < counts["allx"]:
        raise DataError(f"ind.{name}.test.index names nodes that are in ind.{name}.allx")
    for few, many in (("x", "allx"), ("y", "ally")):  # the labelled nodes come first
        first = parts[many][: counts[few]]
        if parts[few].shape != first.shape or not torch.equal(parts[few], first):
            raise DataError(f"ind.{name}.{few} is not how ind.{name}.{many} begins")
