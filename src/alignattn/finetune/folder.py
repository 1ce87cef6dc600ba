"""The output folder: it belongs to one run, and says which.

    OUT/settings.json   what the run was asked to do, and SHA-256 of what it reads: written first
    OUT/checkpoints/    to go on from after a kill; gone when the run is finished
    OUT/model/          the model and its tokenizer, as transformers loads them
    OUT/result.json     written last: a folder that has it is finished

A checkpoint counts once it holds the file `whole`, which is written when every other part of it is there.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alignattn.errors import DataError
from alignattn.files import write_whole
from alignattn.weights import Auto

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]

WHOLE = "whole"
MOST = 3  # differences to name
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_ABANDONED = re.compile(r"\.(settings|result)\.json\..*\.part")


@dataclass(frozen=True)
class Folder:
    """An output folder."""

    path: Path

    @property
    def settings(self) -> Path:
        return self.path / "settings.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def finished(self) -> bool:
        """Whether the run has come to its end."""
        return self.result.is_file()

    def check(self, settings: Mapping[str, Any]) -> None:
        """An error where the folder holds anything but the run with these settings. Nothing is written."""
        with self._writable():
            if self.path.exists() and not self.path.is_dir():
                raise DataError(f"{self.path} is a file. Name another folder with --out.")
            inside = sorted(entry.name for entry in self.path.iterdir()) if self.path.exists() else []
            if self.settings.name in inside:
                self._compare(settings)
                return
            if strangers := [name for name in inside if not _ABANDONED.fullmatch(name)]:
                raise DataError(
                    f"{self.path} is not empty, and holds no run of finetune: there is {strangers[0]}. Name another "
                    "folder with --out."
                )

    def claim(self, settings: Mapping[str, Any]) -> None:
        """Take the folder for the run with these settings."""
        self.check(settings)
        with self._writable():
            if not self.settings.is_file():
                write_whole(self.settings, json.dumps(settings, indent=1, ensure_ascii=False) + "\n")

    @contextmanager
    def held(self) -> Iterator[None]:
        """While it lasts, no other process can hold the folder: nor one that a killed torchrun left behind."""
        if fcntl is None:  # Windows
            yield
            return
        with self.settings.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # goes with the process, however it ends
            except BlockingIOError as error:
                raise DataError(f"{self.path} is in use: this run is under way in another process.") from error
            except OSError:  # a file system without locks
                pass
            yield

    def last_checkpoint(self) -> Path | None:
        """The newest whole one."""
        return max(self._all_checkpoints(whole=True), key=_step, default=None)

    def clear_broken_checkpoints(self) -> None:
        """Remove those that a kill left unfinished."""
        for checkpoint in self._all_checkpoints(whole=False):
            shutil.rmtree(checkpoint)

    def finish(self) -> None:
        """Remove what only served to go on."""
        shutil.rmtree(self.checkpoints, ignore_errors=True)

    @contextmanager
    def new_model(self) -> Iterator[Path]:
        """A folder to save the model to, which takes its place when it is complete."""
        part = self.path / ".model.part"
        with self._writable():
            for old in (part, self.model):  # of this very run, killed while it ended
                shutil.rmtree(old, ignore_errors=True)
            yield part
            part.rename(self.model)

    def _all_checkpoints(self, *, whole: bool) -> list[Path]:
        if not self.checkpoints.is_dir():
            return []
        found = [path for path in self.checkpoints.iterdir() if _CHECKPOINT.fullmatch(path.name)]
        return [path for path in found if (path / WHOLE).is_file() == whole]

    def _compare(self, settings: Mapping[str, Any]) -> None:
        try:
            there = json.loads(self.settings.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"{self.settings} cannot be read. Name another folder with --out.") from error
        here = json.loads(json.dumps(settings))
        if not isinstance(there, dict) or not all(isinstance(value, dict) for value in there.values()):
            raise DataError(f"{self.settings} is not of finetune. Name another folder with --out.")
        told = [
            f"{name} differs" if group == "inputs" else f"{name} is {_said(old)} there and {_said(new)} here"
            for group in here | there
            for name in here.get(group, {}) | there.get(group, {})
            if (old := there.get(group, {}).get(name)) != (new := here.get(group, {}).get(name))
        ]
        if told:
            more = f"; and {len(told) - MOST} more" if len(told) > MOST else ""
            raise DataError(
                f"{self.path} holds another run: {'; '.join(told[:MOST])}{more}. Name another folder with --out."
            )

    @contextmanager
    def _writable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DataError(f"{self.path} cannot be written: {error.strerror or error}.") from error


def mark_whole(checkpoint: Path) -> None:
    """Say that every part of a checkpoint is there."""
    write_whole(checkpoint / WHOLE, "")
    descriptor = os.open(checkpoint, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _step(checkpoint: Path) -> int:
    match = _CHECKPOINT.fullmatch(checkpoint.name)
    return int(match[1]) if match else -1


def _said(value: Any) -> str:
    if isinstance(value, dict) and set(value) == {"share"}:
        return str(Auto(value["share"]))
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
