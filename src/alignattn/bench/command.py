"""The options of `alignattn bench`. Nothing heavy is imported here: --help is instant."""

import argparse
from collections.abc import Callable
from pathlib import Path

from alignattn.arguments import at_least_one, names
from alignattn.bench.parts import LONG_PARTS, PARTS


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of the command."""
    add = parser.add_argument
    add("--quick", action="store_true", help="small models, a minute on two cores")
    quick = f"with --quick all but {' and '.join(LONG_PARTS)}"
    add("--parts", type=names, help=f"of {','.join(PARTS)} (default: all; {quick})")
    add("--methods", type=names, help="such as gan,mmd (default: all)")
    add("--compile", action="store_true", help="whole steps under torch.compile")
    add("--rounds", type=at_least_one, help="how often each is timed")
    add("--device", default="auto", help="cpu, cuda, cuda:1 (default: an accelerator if there is one)")
    add("--out", type=Path, default=Path("runs/bench.json"), help="file to write (default: %(default)s)")


def carry_out(options: argparse.Namespace, say: Callable[[str], object]) -> int:
    """Measure, print and write, case by case: what is measured is kept, whatever happens to the rest."""
    from alignattn.bench import report
    from alignattn.bench.plan import Plan, measure
    from alignattn.experiments.training import Place

    device = Place(device=options.device).torch_device()
    chosen = {name: getattr(options, name) for name in ("parts", "methods") if getattr(options, name)}
    plan = Plan(device, quick=options.quick, compiled=options.compile, rounds=options.rounds, **chosen)
    rows = []
    for case in measure(plan):
        rows += case
        say(report.text(case))
        report.write(options.out, rows, device, _typed(options))
    say(f"Figures: {options.out}")
    return 0


def _typed(options: argparse.Namespace) -> str:
    """The command, for the file: where it is written is left out."""
    parts = ["alignattn", "bench"]
    parts += [f"--{name}" for name in ("quick", "compile") if getattr(options, name)]
    for name in ("parts", "methods"):
        if getattr(options, name):
            parts += [f"--{name}", ",".join(getattr(options, name))]
    if options.device != "auto":
        parts += ["--device", options.device]
    return " ".join(parts + (["--rounds", str(options.rounds)] if options.rounds else []))
