"""The options of `alignattn diagnose`. Nothing heavy is imported here: --help is instant."""

import argparse
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from alignattn.arguments import at_least_one

if TYPE_CHECKING:
    import torch

    from alignattn.diagnosis.batches import Rows
    from alignattn.diagnosis.result import Diagnosis

FORMATS = ("text", "markdown", "csv", "json")
MEASURED = (  # what decides the figures, for the command in the file
    *("text", "rows", "batch_size", "max_length", "layers", "cross"),
    *("permutations", "max_tokens", "seed", "device"),
)
DESCRIPTION = """Where keys and queries of a model differ, head by head, and what to try.

DATA is any file that `alignattn finetune` reads: CSV, TSV, JSON lines, Parquet; its labels are not needed. With
--against both models are measured on the same batches and set side by side: OTHER is before, MODEL after.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of the command."""
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("model", metavar="MODEL", help="folder that holds the model, or its name on the hub")
    add("data", metavar="DATA", type=Path, help="rows of text")
    add("--against", metavar="OTHER", help="a model to set beside it: the one before training, say")
    add("--text", nargs="+", metavar="COLUMN", help="the text column, or two of them (default: found by name)")
    add("--rows", type=at_least_one, default=500, help="to measure on, drawn at random (default: %(default)s)")
    add("--batch-size", type=at_least_one, default=16, help="(default: %(default)s)")
    add(
        "--max-length",
        type=at_least_one,
        help="tokens of a row; more are cut off (default: what the model takes, 512 at most)",
    )
    add("--layers", nargs="+", metavar="LAYER", help="numbers, names or patterns of attention modules (default: all)")
    add("--cross", action="store_true", help="cross-attention too")
    add("--permutations", type=at_least_one, default=200, help="that the noise is told from (default: %(default)s)")
    add("--max-tokens", type=at_least_one, default=2000, help="of a head for the classifier (default: %(default)s)")
    add("--seed", type=int, default=0, help="(default: %(default)s)")
    add("--device", default="auto", help="cpu, cuda, cuda:1 (default: an accelerator if there is one)")
    add("--heads", action="store_true", help="show every head, not only those that differ most")
    add("--format", choices=FORMATS, default="text", help="(default: %(default)s)")
    add(
        "--out", type=Path, metavar="FILE", help="write the diagnosis as JSON; that of OTHER beside it, as FILE-against"
    )


def carry_out(options: argparse.Namespace, say: Callable[[str], object]) -> int:
    """Measure, write, print."""
    from alignattn.diagnosis.batches import check_same_tokens, read_rows
    from alignattn.diagnosis.result import write
    from alignattn.diagnosis.side_by_side import compare_diagnoses
    from alignattn.diagnosis.tables import FORMATS as LAYOUTS
    from alignattn.experiments.training import Place

    device = Place(device=options.device).torch_device()
    text = None if options.text is None else tuple(options.text)
    rows = read_rows(
        options.model, options.data, text=text, rows=options.rows, max_length=options.max_length, seed=options.seed
    )
    if options.against is not None:
        check_same_tokens(rows, options.against)
    after = _measured(options, options.model, rows, device)
    if options.against is None:
        page = LAYOUTS[options.format](after, options.heads)
    else:
        before = _measured(options, options.against, rows, device)
        page = LAYOUTS[options.format](compare_diagnoses(before, after), options.heads)
        if options.out is not None:
            write(before, beside(options.out))
    if options.out is not None:
        write(after, options.out)
    say(page.rstrip("\n"))
    return 0


def beside(out: Path) -> Path:
    """Where the diagnosis of the other model goes."""
    return out.with_stem(f"{out.stem}-against")


def _measured(options: argparse.Namespace, name: str, rows: "Rows", device: "torch.device") -> "Diagnosis":
    from tqdm import tqdm

    from alignattn.diagnosis.batches import feed_rows, load
    from alignattn.diagnosis.measure import diagnose
    from alignattn.models.pretrained import fingerprints

    told = rows.told | {"inputs": rows.told["inputs"] | dict(fingerprints(name)), "batch_size": options.batch_size}
    layers = None if options.layers is None else [int(x) if x.lstrip("-").isdigit() else x for x in options.layers]
    return diagnose(
        load(name, device),
        tqdm(rows.batches(options.batch_size), desc=short(name), unit="batch", leave=False),
        call=feed_rows,
        layers=layers,
        cross=options.cross,
        seed=options.seed,
        permutations=options.permutations,
        max_tokens=options.max_tokens,
        name=short(name),
        settings=told,
        command=typed(options),
    )


def short(name: str) -> str:
    """A folder of this machine by its last name: the place would serve nobody. `model` alone says nothing."""
    path = Path(name)
    if not path.is_dir():
        return name
    path = path.resolve()
    return f"{path.parent.name}/{path.name}" if path.name == "model" else path.name


def typed(options: argparse.Namespace) -> str:
    """What was typed, for the file: the folders of this machine are left out."""
    parts = ["alignattn", "diagnose", short(options.model), options.data.name]
    if options.against is not None:
        parts += ["--against", short(options.against)]
    usual = argparse.ArgumentParser()
    add_options(usual)
    for name in MEASURED:
        value = getattr(options, name)
        if value != usual.get_default(name):
            given = value if isinstance(value, list) else [] if value is True else [value]
            parts += [f"--{name.replace('_', '-')}", *map(str, given)]
    return shlex.join(parts)
