"""Where a result comes from: versions, commit, machine, and the memory it took."""

import functools
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from alignattn import __version__
from alignattn.config import AlignmentConfig
from alignattn.results import Result

PACKAGES = ("torch", "transformers", "numpy", "scikit-learn", "torch-geometric", "triton")
# Within quotes a folder may have spaces; elsewhere one starts at no URL, fraction or relative path.
_FOLDERS = re.compile(r"""(?<=['"])/[^'"\n]*/(?=[^'"\n/])|(?<![\w.:/…])/(?:[^\s/'"]+/)+(?=[^\s/])""")
_ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b")


def documented(config: AlignmentConfig | None, device: torch.device, **known: Any) -> Result:
    """A result with all that does not come from the run itself; `config` is None for soft attention."""
    return Result(
        preset=None if config is None else config.preset,
        reduction=None if config is None else config.reduction,
        alignment=None if config is None else config.acting(),
        versions=versions(),
        commit=commit(),
        machine=machine(device),
        finished=datetime.now(UTC).isoformat(timespec="seconds"),
        **known,
    )


@functools.cache
def versions() -> dict[str, str]:
    """Of Python, of the packages that matter and are installed, and of CUDA."""
    found = {"python": platform.python_version(), "alignattn": __version__}  # of the source that runs
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


@functools.cache
def commit() -> str | None:
    """Of the source tree that this package is run from, with "+" if files differ from it; None if it is installed.

    `ALIGNATTN_COMMIT` says it where the tree was copied without its history.
    """
    if said := os.environ.get("ALIGNATTN_COMMIT"):
        return said
    here = Path(__file__).parent
    head = _git(here, "rev-parse", "HEAD")
    if head is None or _git(here, "ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None  # installed into somebody else's repository, say
    changed = _git(here, "status", "--porcelain", "--untracked-files=no", ":/src")
    return f"{head}+" if changed else head


def machine(device: torch.device) -> dict[str, Any]:
    """What kind of machine, never which one."""
    found: dict[str, Any] = {
        "system": platform.system(),
        "processor": _processor(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "device": str(device.type),
    }
    if device.type == "cuda":
        found["accelerator"] = torch.cuda.get_device_name(device)
    return found


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def anonymous(text: str) -> str:
    """A text without folders and addresses: '/home/me/data/dev.tsv' becomes '…/dev.tsv'."""
    return _ADDRESS.sub("…", _FOLDERS.sub("…/", text))


class PeakMemory:
    """The most memory taken since it was made: the accelerator's, or this process's."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.init()  # else, in a process that has not used it yet, there are no statistics to reset
            torch.cuda.reset_peak_memory_stats(device)
        else:
            self.fresh = _forget_peak()

    def read(self) -> dict[str, Any]:
        """Bytes, and of which memory."""
        if self.device.type == "cuda":
            return {"bytes": torch.cuda.max_memory_allocated(self.device), "of": "accelerator, allocated"}
        peak = _resident_peak()
        if peak is None:
            return {}
        return {"bytes": peak, "of": "process, resident" if self.fresh else "process, resident, since its start"}


def _forget_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")  # Linux: sets the peak back to what is resident now
    except OSError:
        return False
    return True


def _resident_peak() -> int | None:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        try:
            import resource
        except ImportError:
            return None
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    found = re.search(r"VmHWM:\s*(\d+) kB", status)
    return int(found.group(1)) * 1024 if found else None


def _processor() -> str:
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
