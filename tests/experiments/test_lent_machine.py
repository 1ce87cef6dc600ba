"""The two tools for a machine that is lent by the minute: what travels there, and many runs within a limit."""

import subprocess
import sys
import tarfile
from pathlib import Path

from tiny_digits import ARGUMENTS, key

from alignattn.cli import plan_of
from alignattn.results import read_all

TOOLS = Path(__file__).parents[2] / "tools"


def tool(name, *arguments, cwd):
    return subprocess.run(
        [sys.executable, str(TOOLS / name), *map(str, arguments)], cwd=cwd, capture_output=True, text=True, check=False
    )


def test_a_sweep_does_what_its_plan_says_and_keeps_it(tmp_path):
    (tmp_path / "plan").write_text(f"{' '.join(ARGUMENTS[1:])}  # two and two\n\n")
    ran = tool("sweep.py", "plan", "--jobs", 2, "--out", "kept", "--keep", "k.tgz", cwd=tmp_path)
    assert ran.returncode == 0 and "4 runs, 2 at once" in ran.stdout, ran.stderr
    found = read_all([tmp_path / "kept"])
    assert sorted(map(str, map(key, found))) == sorted(
        str((method, weight, seed)) for method, weight in (("soft", None), ("mmd", "auto:0.2")) for seed in (0, 1)
    )
    with tarfile.open(tmp_path / "k.tgz") as tar:
        assert sum(name.endswith(".json") for name in tar.getnames()) == 4
    assert plan_of([*ARGUMENTS, "--out", str(tmp_path / "kept")]).parted()[1] == []  # `alignattn run` knows them

    late = tool("sweep.py", "plan", "--limit", 0, "--out", "kept", "--", "--set", "train.steps=4", cwd=tmp_path)
    assert late.returncode == 1 and "Time is up: 4 runs are not finished." in late.stdout


def test_what_travels_is_enough_to_run_and_the_same_bytes_each_time(tmp_path, encoder_folder, glue_folder):
    common = ["minilm-snli", "--data-dir", glue_folder, "--model", encoder_folder]
    for name in ("one", "two"):
        ran = tool("travel.py", name, *common, cwd=tmp_path)
        assert ran.returncode == 0, ran.stderr
    files = {f.relative_to(tmp_path / "one"): f.read_bytes() for f in (tmp_path / "one").rglob("*") if f.is_file()}
    assert files == {
        f.relative_to(tmp_path / "two"): f.read_bytes() for f in (tmp_path / "two").rglob("*") if f.is_file()
    }
    packed = {"data/snli/snli_1.0_train.jsonl.gz", "data/glue/MNLI/dev_matched.tsv.gz", "model/model.safetensors"}
    assert packed <= set(map(str, files))
    plan = plan_of(
        ["run", "minilm-snli", "--data-dir", str(tmp_path / "one/data"), "--model", str(tmp_path / "one/model")]
    )
    assert {"snli/snli_1.0_train.jsonl.gz", "mnli/dev_matched.tsv.gz", "model/model.safetensors"} <= set(plan.inputs)
