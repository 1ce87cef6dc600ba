"""The command `alignattn`: parses and prints. Everything it does can be imported."""

import argparse
from collections.abc import Sequence

from alignattn import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    options = _parser().parse_args(arguments)
    if options.command == "demo":
        from alignattn import demo

        print(demo.run(seeds=options.seeds, steps=options.steps))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="alignattn", description="Train attention models with aligned keys and queries."
    )
    parser.add_argument("--version", action="version", version=f"alignattn {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="a small vision transformer on digits, soft and aligned, in two minutes")
    demo.add_argument("--seeds", type=_at_least_one, default=3, help="runs of each method (default: %(default)s)")
    demo.add_argument("--steps", type=_at_least_one, default=150, help="training steps a run (default: %(default)s)")
    return parser


def _at_least_one(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value
