"""The options of `alignattn finetune`. Nothing heavy is imported here: --help is instant."""

import argparse
import os
import shlex
from collections.abc import Callable
from pathlib import Path

from alignattn.errors import AlignmentError
from alignattn.finetune.labels import TASKS
from alignattn.finetune.settings import DEVICES, METHODS, PRECISIONS, Settings

DESCRIPTION = """Fine-tune a pretrained model on tables of text and labels.

Files are CSV (quoted cells may hold commas and line ends), TSV (no quoting: a quote is a character), JSON lines, each
also gzipped, or Parquet; UTF-8, with a line of column names. OUT gets model/ (a plain checkpoint), result.json and
settings.json. Killed, the same command goes on. On several accelerators:
torchrun --nproc-per-node 2 --no-python alignattn finetune ...
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Describe every setting."""
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--model", required=True, help="folder that holds the model, or its name on the hub")
    add("--train", required=True, type=Path, metavar="FILE", help="rows to train on; they say what labels there are")
    add("--eval", required=True, type=Path, metavar="FILE", help="rows to measure on")
    add("--out", required=True, type=Path, metavar="OUT", help="folder for this run alone")
    add("--task", choices=TASKS, help="(default: told from the label column); sentence pairs are two text columns")
    add("--text", nargs="+", metavar="COLUMN", help="the text column, or two of them (default: found by name)")
    add("--label", metavar="COLUMN", help="the label column (default: found by name)")
    add("--separator", help="between labels in one cell, for multilabel (default: the first of | ; , that occurs)")
    add("--method", choices=METHODS, default="none", help="of alignment (default: %(default)s)")
    add("--weight", help="of the alignment loss, a number or auto (default: the method's)")
    add("--epochs", type=float, default=Settings.epochs, help="(default: %(default)g)")
    add("--steps", type=int, help="training steps, instead of --epochs")
    add("--learning-rate", type=float, default=Settings.learning_rate, help="(default: %(default)g)")
    add("--batch-size", type=int, default=Settings.batch_size, help="of one update (default: %(default)s)")
    add("--max-length", type=int, help="tokens of a row; more are cut off (default: what the model takes, 512 at most)")
    add("--seed", type=int, default=Settings.seed, help="(default: %(default)s)")
    add("--precision", choices=PRECISIONS, default=Settings.precision, help="(default: %(default)s)")
    add("--device", choices=DEVICES, default=Settings.device, help="(default: an accelerator if there is one)")
    add("--save-steps", type=int, default=Settings.save_steps, help="between checkpoints (default: %(default)s)")


def carry_out(options: argparse.Namespace, say: Callable[[str], object]) -> int:
    """Run what the options ask for. Of torchrun's processes, which all come here, the first one speaks."""
    settings = settings_of(options)
    from alignattn.finetune.run import finetune
    from alignattn.results import METRICS

    first = int(os.environ.get("RANK", "0")) == 0
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    try:
        result = finetune(
            settings, processes=processes, command=typed(settings), announce=say if first else lambda _: None
        )
    except AlignmentError:
        if first:
            raise
        return 1
    if first:
        labels = {name: METRICS[name].label if name in METRICS else name.upper() for name in result.metrics}
        width = max(map(len, labels.values()))
        say("\n".join(f"{labels[name]:<{width}}  {value:.4f}" for name, value in result.metrics.items()))
        say(f"Model: {settings.out / 'model'}\nResult: {settings.out / 'result.json'}")
    return 0


def settings_of(options: argparse.Namespace) -> Settings:
    """The options as settings."""
    values = {name: getattr(options, name) for name in Settings.__dataclass_fields__}
    return Settings(**values | {"text": None if options.text is None else tuple(options.text)})


def typed(settings: Settings) -> str:
    """What was typed, for the result file: the folders of this machine are left out, they would serve nobody."""
    parts = ["alignattn", "finetune"]
    for name, field in Settings.__dataclass_fields__.items():
        value = getattr(settings, name)
        if value == field.default:
            continue
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, tuple):
            parts += [option, *value]
        elif name == "out":
            parts += [option, "OUT"]
        elif isinstance(value, Path) or (name == "model" and Path(value).is_dir()):
            parts += [option, Path(value).name]
        else:
            parts += [option, f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join(parts)
