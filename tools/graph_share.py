"""Writes what weight="auto" does on a graph: alignment's share of the gradient and the weight, look by look.

    python tools/graph_share.py cora --data-dir DATA --out results/shares/cora.json

A GAT of PyG's layers is trained as anyone would, aligned by each method of preset "stable" from one seed; OT, CT and
MMD match 512 nodes, drawn anew in each epoch. Shares are those of single updates, every tenth.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

import alignattn
from alignattn import balance, provenance
from alignattn.config import METHODS
from alignattn.datasets.graphs import NodeGraph, load_graph
from alignattn.files import write_whole
from alignattn.models.gat import GAT

NODES = 512
FIRST = {"preset": None, "watching": 0.0}  # first_weight: the preset's own, and one that only watches
LOGGED = {"alignment_share": "share", "alignment_weight": "weight"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graph")
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    commit = provenance.commit()
    graph = load_graph(options.graph, options.data_dir)
    told = {
        "kind": "graph share",
        "schema": 1,
        "command": shlex.join(["python", "tools/graph_share.py", *map(provenance.anonymous, sys.argv[1:])]),
        "commit": commit,
        "versions": provenance.versions(),
        "inputs": dict(graph.sha256),
        "target": alignattn.Auto().share,
        "every": balance.EVERY,
        "looks": {
            first: {method: looks(graph, method, weight, options.epochs) for method in METHODS}
            for first, weight in FIRST.items()
        },
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(options.out, json.dumps(told) + "\n")
    print(f"wrote {options.out}")


def looks(graph: NodeGraph, method: str, first_weight: float | None, epochs: int) -> list[dict[str, float]]:
    """Share and weight of every update that was looked at."""
    torch.manual_seed(0)
    model = GAT(graph.features.shape[1], graph.classes).train()
    chosen = {} if method == "gan" else {"max_tokens": NODES}
    if first_weight is not None:
        chosen["first_weight"] = first_weight
    alignment = alignattn.align(model, method, "auto", **chosen)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005, weight_decay=5e-4)
    found = []
    for epoch in range(epochs):
        optimizer.zero_grad()
        logits = model(graph.features, graph.edges)[graph.train]
        (F.cross_entropy(logits, graph.labels[graph.train]) + alignment.loss()).backward()
        optimizer.step()
        logged = alignment.meter.read()
        if "alignment_share" in logged:
            found.append({"epoch": epoch} | {short: round(logged[name], 5) for name, short in LOGGED.items()})
    alignment.detach()
    return found


if __name__ == "__main__":
    main()
