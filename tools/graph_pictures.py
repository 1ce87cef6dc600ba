"""Writes what pictures of graph attention are drawn from: one of Planetoid's graphs, trained soft and aligned.

    python tools/graph_pictures.py cora gan --data-dir DATA --out results/pictures/cora.json

Both runs are those of the recipe, from its first seed. Pictures are drawn from the file by tools/figures.py.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from alignattn import provenance
from alignattn.experiments import graph_pictures
from alignattn.experiments import recipe as recipes
from alignattn.experiments.settings import SOFT
from alignattn.experiments.tasks.graph import NodeClassification
from alignattn.experiments.training import Place, measure, train
from alignattn.files import write_whole
from alignattn.weights import write_weight


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("method", help="gan, ot, ct or mmd, beside soft attention")
    parser.add_argument("--weight", type=float, help="(default: the recipe's)")
    parser.add_argument("--steps", type=int, help="epochs at most (default: the recipe's)")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    settings: dict[str, Any] = {"seeds": 1, "align": {"methods": [SOFT, options.method]}}
    if options.weight is not None:
        settings["align"]["weights"] = [options.weight]
    if options.steps is not None:
        settings["train"] = {"steps": options.steps}
    commit = provenance.commit()  # of the code that is running, whatever is committed while it does
    recipe = recipes.load(options.recipe, [settings])
    place = Place(options.data_dir, device="cpu", threads=1)
    trained = {
        run.method if run.weight is None else f"{run.method} {write_weight(run.weight)}": train(run, place)
        for run in recipe.runs()
    }
    task = next(iter(trained.values())).task
    assert isinstance(task, NodeClassification)
    told = {
        "kind": "graph pictures",
        "schema": 1,
        "command": shlex.join(
            ["python", "tools/graph_pictures.py", *map(provenance.anonymous, arguments or sys.argv[1:])]
        ),
        "commit": commit,
        "versions": provenance.versions(),
        "inputs": dict(task.graph.sha256),
        "recipe": recipe.settings(),
        "runs": {title: of_run(measure(one)) for title, one in trained.items()},
        **graph_pictures.tell(trained),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(options.out, json.dumps(told) + "\n")
    print(
        f"wrote {options.out}, {options.out.stat().st_size / 1000:.0f} kB: node {told['node']}, {told['layer']} "
        f"layer, head {told['head']}, changed by {told['changed']} %"
    )


def of_run(measured: dict[str, Any]) -> dict[str, Any]:
    """What came out, without the details that pictures of this kind do not show."""
    return {"metrics": measured["metrics"], "stopping": measured["details"]["stopping"], "times": measured["times"]}


if __name__ == "__main__":
    main()
