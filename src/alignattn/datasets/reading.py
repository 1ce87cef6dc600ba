r"""The lines of a file, numbered, as bytes.

A line ends at \n and nowhere else: `str.splitlines` also cuts at U+2028, U+0085 and form feeds, which stand inside
sentences. The byte order mark, one \r before \n, and empty lines at the very end of the file are no part of the data.
Lines stay bytes because one of them may not be UTF-8, and the others are to be read all the same.
"""

import codecs
import gzip
import hashlib
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from alignattn.errors import DataError


def numbered_lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """The lines without their ends, counted from 1; `b""` for one of white space. `.gz` is unpacked on the way."""
    empty: list[int] = []  # held back, because those at the end of the file are dropped
    number = 0
    with _named_errors(file), gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            line = line.removesuffix(b"\n").removesuffix(b"\r")
            if not line.strip():
                empty.append(number)
                continue
            yield from ((earlier, b"") for earlier in empty)
            empty.clear()
            yield number, line
    if number == len(empty):
        raise DataError(f"{file} is empty.")


def sha256(file: Path) -> str:
    """The digest of the bytes as stored: of a `.gz`, the packed ones, as `sha256sum` prints it."""
    with _named_errors(file), file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def _named_errors(file: Path) -> Iterator[None]:
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{file} is truncated or corrupt: {error}. Download or pack it again.") from error
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error}.") from error
