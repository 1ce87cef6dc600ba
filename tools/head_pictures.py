"""Writes what pictures of one head are drawn from: its queries and keys in two checkpoints, and what they attend to.

    python tools/head_pictures.py soft=RUN ot=RUN --data dev.jsonl --out results/pictures/minilm-sst2.json

RUN is a folder that `alignattn finetune` left, the first without alignment. The head is the one in which keys and
queries of the first lie farthest apart. Pictures are drawn from the file by tools/figures.py.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from alignattn import provenance
from alignattn.capture import QueryKey, Tap
from alignattn.capture.feed import feed, in_eval_mode
from alignattn.diagnosis.attention import attention_of
from alignattn.diagnosis.batches import read_rows
from alignattn.diagnosis.mmd import discrepancy
from alignattn.files import write_whole
from alignattn.models import pretrained

TOKENS = 200  # of each cloud
ROWS = 128
LENGTHS = range(8, 14)  # tokens of the sentences that are shown, three of them
DIGITS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="TITLE=RUN")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    runs = {title: Path(folder) for title, _, folder in (run.partition("=") for run in options.runs)}
    first = str(next(iter(runs.values())) / "model")
    rows = read_rows(first, options.data, text=None, rows=ROWS, max_length=128, seed=0)
    batches = rows.batches(32)
    models = {}
    for title, run in runs.items():
        with pretrained.quiet():
            models[title] = pretrained.library().AutoModel.from_pretrained(run / "model", dtype=torch.float32)
    distances = discrepancy(next(iter(models.values())), batches, call=feed)
    layer, head = max(
        ((layer, head) for layer, values in distances.items() for head in range(len(values))),
        key=lambda place: float(distances[place[0]][place[1]]),
    )
    sentences = [row["input_ids"] for row in rows.encoded if len(row["input_ids"]) in LENGTHS][:3]
    tokens = [rows.tokenizer.convert_ids_to_tokens(sentence) for sentence in sentences]
    told: dict[str, Any] = {
        "kind": "pictures",
        "schema": 1,
        "command": shlex.join(["python", "tools/head_pictures.py", *sys.argv[1:]]),
        "commit": provenance.commit(),
        "versions": provenance.versions(),
        "data": rows.told,
        "runs": {title: json.loads((run / "result.json").read_text()) for title, run in runs.items()},
        "layer": layer,
        "head": head,
        "mmd": {
            title: round(float(discrepancy(model, batches, call=feed)[layer][head]), 4)
            for title, model in models.items()
        },
        "tokens": tokens,
        "clouds": {title: cloud(model, batches, layer, head) for title, model in models.items()},
        "attention": {
            title: [
                rounded(attention_of(model, {"input_ids": torch.tensor([sentence])}, layer)[0, head])
                for sentence in sentences
            ]
            for title, model in models.items()
        },
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(options.out, json.dumps(told) + "\n")
    print(f"wrote {options.out}: head {head} of {layer}, MMD² {told['mmd']}")


@torch.no_grad()
def cloud(model: torch.nn.Module, batches: list[Any], layer: str, head: int) -> dict[str, list[list[float]]]:
    """Queries and keys of the same tokens, drawn at random."""
    sides: dict[str, list[torch.Tensor]] = {"query": [], "key": []}

    def keep(record: QueryKey) -> None:
        for side, kept in sides.items():
            tokens, mask = getattr(record, side)[:, head], getattr(record, f"{side}_mask")
            kept.append(tokens.flatten(0, 1) if mask is None else tokens[mask])

    tap = Tap(model, watch=keep, always=True, layers=layer)
    try:
        with in_eval_mode(model):
            for batch in batches:
                feed(model, batch)
    finally:
        tap.remove()
    whole = {side: torch.cat(kept) for side, kept in sides.items()}
    chosen = torch.randperm(len(whole["query"]), generator=torch.Generator().manual_seed(0))[:TOKENS]
    return {side: rounded(tokens[chosen]) for side, tokens in whole.items()}


def rounded(values: torch.Tensor) -> list[list[float]]:
    return [[round(value, DIGITS) for value in row] for row in values.tolist()]


if __name__ == "__main__":
    main()
