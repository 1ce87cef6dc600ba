"""Runs on a Ray cluster. Ray starts a run anew elsewhere when its worker or machine dies; results come back here.

Every machine of the cluster needs the same Python packages, and data and models under the same paths; the source of
alignattn itself is sent along.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from alignattn.errors import AlignmentError
from alignattn.experiments.recipe import Run
from alignattn.experiments.runner import Executor
from alignattn.experiments.training import Place, Progress, execute, lost, task_of
from alignattn.results import Result

RETRIES = 3  # of a run whose worker died; an error of the run itself is reported at once


def ray_cluster(address: str | None = None, *, per_accelerator: int = 1) -> Executor:
    """An executor on the cluster at an address; without one, RAY_ADDRESS's or a fresh one on this machine.

    Where the cluster has accelerators, `per_accelerator` runs share one.
    """
    try:
        import ray
    except ImportError as error:
        raise AlignmentError("--ray needs Ray: pip install 'alignattn[ray]'") from error

    def executor(
        runs: Sequence[Run], place: Place, inputs: Mapping[str, str], progress: Progress
    ) -> Iterator[tuple[Run, Result]]:
        ours = not ray.is_initialized()
        if ours:
            package = str(Path(__file__).parent.parent)
            ray.init(address=address, log_to_driver=False, runtime_env={"py_modules": [package]})
        try:
            accelerators = ray.cluster_resources().get("GPU", 0)
            share = 1 / per_accelerator if accelerators else 0
            remote = ray.remote(num_cpus=1, num_gpus=share, max_retries=RETRIES)(execute)
            steps = runs[0].recipe.train.steps_for(task_of(runs[0], place).samples)
            waiting: dict[Any, Run] = {remote.remote(run, place, inputs): run for run in runs}
            while waiting:
                (ready,), _ = ray.wait(list(waiting), num_returns=1)
                run = waiting.pop(ready)
                try:
                    result = ray.get(ready)
                except (ray.exceptions.RayError, ImportError) as error:
                    first = next(iter(str(error).strip().splitlines()), "")
                    result = lost(run, place, inputs, f"was lost: {type(error).__name__}: {first}")
                progress(steps)
                yield run, result
        finally:
            if ours:
                ray.shutdown()

    return executor
