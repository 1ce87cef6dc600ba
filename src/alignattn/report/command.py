"""The options of `alignattn report`. Nothing heavy is imported here: --help is instant."""

import argparse
from collections.abc import Callable
from pathlib import Path

from alignattn.errors import AlignmentError, DataError

DESCRIPTION = """Write one HTML file that shows results: tables that sort, pictures, what was run.

PATHs are result files, folders of them, comparisons printed by `alignattn compare --format json`, or diagnoses, in any
mixture. The page needs no network, prints, and can be sent to anyone.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Describe every setting."""
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("paths", nargs="+", type=Path, metavar="PATH", help="result files, comparisons, diagnoses, or folders of them")
    add("--out", type=Path, default=Path("report.html"), metavar="FILE", help="(default: %(default)s)")
    add("--title", help="the page's heading")


def carry_out(options: argparse.Namespace, say: Callable[[str], object]) -> int:
    """Write the page."""
    try:
        from alignattn.report.build import TITLE, report
    except ImportError as error:
        raise AlignmentError(f"report needs {error.name}: pip install 'alignattn[demo]'") from error
    from alignattn.files import write_whole

    if options.out.is_dir():
        raise DataError(f"{options.out} is a folder. Name a file, such as {options.out / 'report.html'}.")
    text = report(options.paths, TITLE if options.title is None else options.title)
    try:
        write_whole(options.out, text)
    except OSError as error:
        raise DataError(f"{options.out} cannot be written: {error.strerror}.") from error
    say(f"wrote {options.out}")
    return 0
