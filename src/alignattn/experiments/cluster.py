"""Runs on a Ray cluster. Ray starts a run anew elsewhere when its worker or machine dies; results come back here.

Every machine of the cluster needs the same Python packages, and data and models under the same paths; the source of
alignattn itself is sent along.
"""

import logging
import os
import socket
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from alignattn.errors import AlignmentError
from alignattn.experiments.recipe import Run
from alignattn.experiments.runner import Executor
from alignattn.experiments.training import Place, Progress, execute, lost, task_of
from alignattn.provenance import commit
from alignattn.results import Result

RETRIES = 3  # of a run whose worker died; an error of the run itself is reported at once


def ray_cluster(address: str | None = None, *, per_accelerator: int = 1) -> Executor:
    """An executor on the cluster at an address; without one RAY_ADDRESS's, this machine's, or a fresh one here.

    Where the cluster has accelerators, `per_accelerator` runs share one.
    """
    try:
        import ray
    except ImportError as error:
        raise AlignmentError("--ray needs Ray: pip install 'alignattn[ray]'") from error

    def executor(
        runs: Sequence[Run], place: Place, inputs: Mapping[str, str], progress: Progress
    ) -> Generator[tuple[Run, Result], None, None]:
        ours = not ray.is_initialized()
        if ours:
            _connect(ray, address)
        try:
            accelerators = ray.cluster_resources().get("GPU", 0)
            share = 1 / per_accelerator if accelerators and place.device != "cpu" else 0
            remote = ray.remote(num_cpus=1, num_gpus=share, max_retries=RETRIES)(execute)
            steps = runs[0].recipe.train.steps_for(task_of(runs[0], place).samples)
            waiting: dict[Any, Run] = {remote.remote(run, place, inputs): run for run in runs}
            while waiting:
                (ready,), _ = ray.wait(list(waiting), num_returns=1)
                run = waiting.pop(ready)
                try:
                    result = ray.get(ready)
                except (ray.exceptions.RayError, ImportError) as error:
                    lines = str(error).strip().splitlines() or [""]
                    told = lines[-1] if isinstance(error, ray.exceptions.RayTaskError) else lines[0]
                    result = lost(run, place, inputs, f"was lost: {type(error).__name__}: {told.rstrip('.')}")
                progress(steps)
                yield run, result
        finally:
            if ours:
                ray.shutdown()

    return executor


def _connect(ray: Any, address: str | None) -> None:
    """Connect, and send our source along: with its commit, which cannot be asked of a copy."""
    environment: dict[str, Any] = {"py_modules": [str(Path(__file__).parent.parent)]}
    if (ours := commit()) is not None:
        environment["env_vars"] = {"ALIGNATTN_COMMIT": ours}
    at = address or os.environ.get("RAY_ADDRESS", "")
    host, _, port = at.removeprefix("ray://").rpartition(":")
    try:
        if port.isdigit():  # Ray itself would try for minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        # Below warnings Ray would write into the progress bar.
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING, runtime_env=environment)
    except (OSError, RuntimeError, ValueError) as error:
        raise AlignmentError(
            f"No Ray cluster {f'at {at}' if at else 'here'}: {error}. "
            "`ray start --head` starts one and prints its address; without ADDRESS one is started here for this sweep."
        ) from error
