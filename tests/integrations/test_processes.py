"""Two processes over gloo, by every host: few launches, many assertions each (several_processes.py)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "several_processes.py"


def launch(*command, hosts, folder):
    processors = {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}  # a machine may have one accelerator
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **processors}
    done = subprocess.run(
        [*command, str(SCRIPT), str(folder), *hosts],
        capture_output=True,
        text=True,
        timeout=500,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return set(done.stdout.splitlines())


@pytest.mark.slow
def test_torchrun_with_ddp_by_accelerate_and_the_trainer_and_with_fsdp(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    told = launch(*command, hosts=["accelerate", "fsdp", "trainer"], folder=tmp_path)
    expected = {f"equal: {host}, {method}" for host in ("accelerate", "FSDP2", "Trainer") for method in ("gan", "mmd")}
    assert expected <= told


@pytest.mark.slow
def test_accelerate_launch(tmp_path):
    # --multi_gpu starts processes as torchrun does; the script itself asks for the CPU.
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    told = launch(*command, hosts=["accelerate"], folder=tmp_path)
    assert {"equal: accelerate, gan", "equal: accelerate, mmd"} <= told
