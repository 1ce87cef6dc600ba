"""The command `alignattn`: parses and prints. Everything it does can be imported."""

import argparse
import shlex
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alignattn import __version__
from alignattn.arguments import at_least_one, names, seeds, weights
from alignattn.bench import command as bench_command
from alignattn.diagnosis import command as diagnose_command
from alignattn.errors import AlignmentError, AlignmentWarning, DataError
from alignattn.finetune import command as finetune_command
from alignattn.report import command as report_command
from alignattn.weights import write_weight

if TYPE_CHECKING:
    from alignattn.experiments.compare import Comparison
    from alignattn.experiments.recipe import Recipe
    from alignattn.experiments.runner import Executor, Outcome, Sweep
    from alignattn.experiments.training import Place

FORMATS = ("text", "markdown", "csv", "json")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    options = _parser().parse_args(arguments)
    handler: Callable[[argparse.Namespace], int] = options.handler
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning  # type: ignore[assignment]  # takes what it is given, uses less
        warnings.simplefilter("always", AlignmentWarning)
        try:
            return handler(options)
        except AlignmentError as error:
            print(f"alignattn: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("\nStopped. What is finished is kept: the same command goes on from there.", file=sys.stderr)
            return 130
        except BrokenPipeError:  # the reader of our output has gone, as `head` does
            sys.stderr.close()
            return 141


def _demo(options: argparse.Namespace) -> int:
    try:
        from alignattn import demo
    except ImportError as error:
        raise AlignmentError(f"The demo needs {error.name}: pip install 'alignattn[demo]'") from error
    settings = {"seeds": options.seeds, "steps": options.steps, "workers": options.workers}
    print(demo.run(options.out, graph=options.graph, **settings))
    return 0


def _run(options: argparse.Namespace) -> int:
    from alignattn.experiments import recipe as recipes

    if options.list:
        shipped = recipes.shipped()
        width = max(map(len, shipped))
        print("\n".join(f"{name:<{width}}  {description}" for name, description in shipped.items()))
        return 0
    if options.recipe is None:
        raise AlignmentError("Which recipe? `alignattn run --list` names those that come with it.")
    from alignattn.experiments import runner

    if options.dry_run:
        return _dry_run(*_recipe_and_place(options), options)
    plan = runner.sweep(*_recipe_and_place(options), options.out)
    outcome = runner.carry_out(plan, _executor(options))
    return _report(outcome, plan)


def plan_of(arguments: Sequence[str]) -> "Sweep":
    """The sweep that `alignattn run` would carry out."""
    from alignattn.experiments import runner

    options = _parser().parse_args(arguments)
    return runner.sweep(*_recipe_and_place(options), options.out)


def _recipe_and_place(options: argparse.Namespace) -> tuple["Recipe", "Place"]:
    from alignattn.experiments import recipe as recipes
    from alignattn.experiments import training

    recipe = recipes.load(options.recipe, _overrides(options))
    return recipe, training.Place(options.data_dir, options.device, options.threads, _command(options))


def _dry_run(recipe: "Recipe", place: "Place", options: argparse.Namespace) -> int:
    from alignattn.experiments import runner

    for table, values in recipe.settings().items():
        if isinstance(values, dict):
            print(f"[{table}]")
            print("\n".join(f"{key} = {value!r}" for key, value in values.items()))
        else:
            print(f"{table} = {values!r}")
    print(f"\n{len(recipe.runs())} runs:")
    print("\n".join(f"  {run.label}" for run in recipe.runs()))
    try:
        plan = runner.sweep(recipe, place, options.out)
        told = runner.estimate(plan)
    except AlignmentError as error:
        steps = recipe.train.steps or f"{recipe.train.epochs:g} epochs, so many"
        print(f"\n{steps} steps a run. No estimate of time: {error}")
        return 0
    print(f"\n{told.steps} steps a run; {told.finished} of {told.runs} runs are finished in {options.out}.")
    paces = ", ".join(f"{method} {1000 * seconds:.0f}" for method, seconds in told.step_seconds.items())
    print(f"Milliseconds a step here, from {runner.PROBE_STEPS} steps each: {paces}.")
    print(f"About {_duration(told.seconds)} for the rest, one run after another.")
    return 0


def _report(outcome: "Outcome", plan: "Sweep") -> int:
    new = len(outcome.finished) - outcome.before
    before = f", {outcome.before} were there already" if outcome.before else ""
    folder = plan.out / plan.recipe.name
    print(f"{new} {'run' if new == 1 else 'runs'} finished{before}. Results: {folder}")
    if outcome.finished:
        print(f"Compare them: alignattn compare {shlex.quote(str(folder))}")
    for result in outcome.failed:
        weight = "" if result.weight is None else f" {write_weight(result.weight)}"
        print(f"\nFAILED {result.method}{weight}, seed {result.seed}: {result.error}", file=sys.stderr)
    if outcome.failed:
        print(f"\n{len(outcome.failed)} runs failed; the same command tries them again.", file=sys.stderr)
    return 1 if outcome.failed else 0


def _compare(options: argparse.Namespace) -> int:
    try:
        from alignattn.experiments import compare, tables
    except ImportError as error:
        raise AlignmentError(f"compare needs {error.name}: pip install 'alignattn[demo]'") from error
    from alignattn.results import read_all

    metrics = names(options.metrics) if options.metrics else None
    results = read_all(options.results)
    print(tables.FORMATS[options.format](compare.compare(results, metrics)), end="")
    if options.frontier is not None:
        shown = None if metrics is None else list(dict.fromkeys([*metrics, "mmd"]))
        _draw_frontier(compare.compare(results, shown), options.frontier)
    return 0


def _draw_frontier(comparisons: "Sequence[Comparison]", path: Path) -> None:
    """One picture, or one for each table that has a frontier, with the table's number behind the name."""
    from alignattn import plots
    from alignattn.experiments.frontier import frontier

    for number, comparison in enumerate(comparisons, 1):
        place = path if len(comparisons) == 1 else path.with_stem(f"{path.stem}-{number}")
        try:
            plots.save(frontier(comparison), place)
        except DataError as error:
            if len(comparisons) == 1:
                raise
            print(error, file=sys.stderr)
        else:
            print(f"wrote {place}", file=sys.stderr)


def _finetune(options: argparse.Namespace) -> int:
    return finetune_command.carry_out(options, print)


def _diagnose(options: argparse.Namespace) -> int:
    return diagnose_command.carry_out(options, print)


def _bench(options: argparse.Namespace) -> int:
    return bench_command.carry_out(options, print)


def _report_page(options: argparse.Namespace) -> int:
    return report_command.carry_out(options, print)


def _executor(options: argparse.Namespace) -> "Executor":
    if options.ray is not None:
        from alignattn.experiments.cluster import ray_cluster

        return ray_cluster(options.ray or None, per_accelerator=options.workers)
    if options.workers > 1:
        from alignattn.experiments.pool import processes

        return processes(options.workers)
    from alignattn.experiments.runner import one_after_another

    return one_after_another


def _overrides(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The options as tables to lay over the recipe's."""
    from alignattn.experiments.reading import parse_override

    overrides = [parse_override(text) for text in options.set]
    if options.seeds is not None:
        overrides.append({"seeds": options.seeds})
    if options.methods is not None:
        overrides.append({"align": {"methods": options.methods}})
    if options.weights is not None:
        overrides.append({"align": {"weights": options.weights}})
    if options.model is not None:
        overrides.append({"model": {"name": options.model}})
    return overrides


def _command(options: argparse.Namespace) -> str:
    """What was typed, for the result file: the places of this machine are left out, they would serve nobody."""
    parts = ["alignattn", "run", Path(options.recipe).name if options.recipe.endswith(".toml") else options.recipe]
    if options.seeds is not None:
        parts += [
            "--seeds",
            str(options.seeds) if isinstance(options.seeds, int) else ",".join(map(str, options.seeds)),
        ]
    if options.methods is not None:
        parts += ["--methods", ",".join(options.methods)]
    if options.weights is not None:
        parts += ["--weights", ",".join(map(write_weight, options.weights))]
    for text in options.set:
        parts += ["--set", text]
    if options.data_dir is not None:
        parts += ["--data-dir", "DATA"]
    if options.model is not None:
        parts += ["--model", Path(options.model).name if Path(options.model).is_dir() else options.model]
    if options.workers > 1:
        parts += ["--workers", str(options.workers)]
    return shlex.join(parts)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="alignattn", description="Train attention models with aligned keys and queries."
    )
    parser.add_argument("--version", action="version", version=f"alignattn {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    demo = commands.add_parser("demo", help="a small vision transformer on digits, soft and aligned, in two minutes")
    demo.set_defaults(handler=_demo)
    demo.add_argument("--graph", action="store_true", help="a GAT on a graph made of a seed instead, in a minute")
    demo.add_argument("--seeds", type=at_least_one, help="runs of each method (default: 5, with --graph 3)")
    demo.add_argument("--steps", type=at_least_one, help="training steps a run (default: the recipe's)")
    demo.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder to fill (default: %(default)s)")
    demo.add_argument("--workers", type=at_least_one, help="processes (default: one a core, two at most)")

    run = commands.add_parser(
        "run", help="run a recipe: train every method from every seed, keep a result file of each"
    )
    run.set_defaults(handler=_run)
    run.add_argument("recipe", nargs="?", help="the name of a recipe, or the path of a .toml file")
    run.add_argument("--list", action="store_true", help="name the recipes that come with alignattn, and end")
    run.add_argument("--dry-run", action="store_true", help="show settings, steps and estimated time, and end")
    run.add_argument("--seeds", type=seeds, help="how many, from 0 on; or which: 3,4,5 or 3-5")
    run.add_argument("--methods", type=names, help="such as soft,gan,ot,ct,mmd")
    run.add_argument("--weights", type=weights, help="of the alignment loss, such as 0.1,1,auto: each method with each")
    run.add_argument("--data-dir", type=Path, help="folder that holds the data")
    run.add_argument("--model", help="folder that holds the model, or its name on the hub")
    run.add_argument("--out", type=Path, default=Path("runs"), help="folder for result files (default: %(default)s)")
    run.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any setting: train.steps=100")
    run.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 (default: an accelerator if there is one)")
    run.add_argument(
        "--threads", type=at_least_one, help="of torch on the CPU, each worker's (default: share the cores)"
    )
    run.add_argument("--workers", type=at_least_one, default=1, help="processes at once (default: %(default)s)")
    run.add_argument(
        "--ray",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="run on a Ray cluster; without ADDRESS on RAY_ADDRESS's, one that runs here, or a fresh one. "
        "--workers says how many runs share an accelerator",
    )

    finetune = commands.add_parser(
        "finetune", help="fine-tune a model on a CSV, TSV, JSONL or Parquet file of your own"
    )
    finetune.set_defaults(handler=_finetune)
    finetune_command.add_options(finetune)

    diagnose = commands.add_parser(
        "diagnose", help="where keys and queries of a model differ, head by head, and what to try"
    )
    diagnose.set_defaults(handler=_diagnose)
    diagnose_command.add_options(diagnose)

    bench = commands.add_parser("bench", help="what alignment costs on this machine, beside soft attention and peers")
    bench.set_defaults(handler=_bench)
    bench_command.add_options(bench)

    compare = commands.add_parser("compare", help="set results beside soft attention and the paper, with a verdict")
    compare.set_defaults(handler=_compare)
    compare.add_argument("results", nargs="+", type=Path, help="result files, or folders of them")
    compare.add_argument("--format", choices=FORMATS, default="text", help="(default: %(default)s)")
    compare.add_argument("--metrics", help="such as accuracy,ece@mnli (default: what the recipe reports)")
    compare.add_argument("--frontier", type=Path, metavar="FILE", help="draw metrics against MMD²: png, svg or pdf")

    report = commands.add_parser("report", help="write one HTML page of results, comparisons and diagnoses")
    report.set_defaults(handler=_report_page)
    report_command.add_options(report)
    return parser


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def _show_warning(message: Any, category: Any, filename: str, lineno: int, *_: Any) -> None:
    if issubclass(category, AlignmentWarning):
        print(f"alignattn: warning: {message}", file=sys.stderr)
    else:
        print(warnings.formatwarning(message, category, filename, lineno), end="", file=sys.stderr)
