"""Result files: whole or not at all, and never a crash from what somebody else wrote."""

import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignattn.errors import AlignmentWarning, DataError
from alignattn.results import SCHEMA, Result, read, read_all, write


def result(**changes):
    values = {
        "name": "digits",
        "recipe": {"task": "digits", "train": {"steps": 3}},
        "method": "mmd",
        "preset": "stable",
        "weight": 0.1,
        "reduction": "mean",
        "alignment": {"generator": "model"},
        "seed": 4,
        "metrics": {"accuracy": 91.25, "ece": 3.0},
        "details": {"reliability": {"count": [0, 2], "confidence": [math.nan, 0.5]}},
        "times": {"train": 1.5, "step": 0.01},
        "peak_memory": {"bytes": 1000, "of": "process, resident"},
        "inputs": {"digits": "ab" * 32},
        "versions": {"python": "3.11.0"},
        "commit": "c" * 40,
        "machine": {"cores": 2},
        "command": "alignattn run digits",
        "finished": "2026-11-15T06:00:00+00:00",
    }
    return Result(**(values | changes))


def test_what_is_written_is_read_again(tmp_path):
    write(result(), tmp_path / "deep" / "er" / "a.json")
    again = read(tmp_path / "deep" / "er" / "a.json")
    assert again.metrics == {"accuracy": 91.25, "ece": 3.0}
    assert again.details["reliability"]["count"] == [0, 2]
    assert math.isnan(again.details["reliability"]["confidence"][0])
    for name in ("name", "recipe", "method", "preset", "weight", "seed", "times", "commit", "machine", "inputs"):
        assert getattr(again, name) == getattr(result(), name)


def test_the_file_is_strict_json_with_its_schema(tmp_path):
    write(result(metrics={"nll": math.inf, "mmd": -math.inf, "pearson": math.nan}), tmp_path / "a.json")
    values = json.loads((tmp_path / "a.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} in JSON"))
    assert values["schema"] == SCHEMA == 1
    assert values["metrics"] == {"nll": "Infinity", "mmd": "-Infinity", "pearson": "NaN"}
    again = read(tmp_path / "a.json").metrics
    assert again["nll"] == math.inf and again["mmd"] == -math.inf and math.isnan(again["pearson"])


@given(st.dictionaries(st.text(), st.floats()), st.text(), st.lists(st.text()))
def test_any_metrics_and_texts_survive(metrics, command, texts):
    given_ = result(metrics=metrics, command=command, recipe={"texts": texts, "[\n": "]\n [1,\n 2]"})
    again = Result.from_json(given_.to_json())
    assert again.command == command and again.recipe == given_.recipe
    assert list(map(repr, again.metrics.values())) == list(map(repr, metrics.values()))


def test_a_failed_run_is_told_from_a_finished_one():
    assert not result().failed
    assert Result.from_json(result(metrics={}, error="ValueError: no").to_json()).failed


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no JSON"),
        ('{"schema": 1, "name"', "no JSON"),
        ("[1, 2]", "names no schema"),
        ("{}", "names no schema"),
        ('{"schema": "1"}', "which is no version"),
        ('{"schema": true}', "which is no version"),
        ('{"schema": 0}', "which is no version"),
        ('{"schema": 1}', "lacks 'name'"),
        ("[" * 100_000, "recursion"),
        ("\ud800", None),
    ],
)
def test_a_broken_file_is_named_and_skipped(text, reason, tmp_path):
    (tmp_path / "broken.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    write(result(), tmp_path / "good.json")
    with pytest.warns(AlignmentWarning, match=r"Skipped: .*broken\.json") as warned:
        assert [r.method for r in read_all([tmp_path])] == ["mmd"]
    if reason:
        assert reason in str(warned[0].message)


def test_a_file_of_a_newer_schema_is_named_and_skipped(tmp_path):
    values = json.loads(result().to_json()) | {"schema": 2, "new_field": 1}
    (tmp_path / "newer.json").write_text(json.dumps(values))
    with pytest.warns(AlignmentWarning, match=r"newer\.json.*schema is 2 and this alignattn reads up to 1"):
        assert read_all([tmp_path]) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"seed": "four"}, "its 'seed' is 'four'"),
        ({"seed": True}, "its 'seed' is True"),
        ({"metrics": {"accuracy": "high"}}, "which is no number"),
        ({"metrics": {"accuracy": None}}, "which is no number"),
        ({"metrics": [1]}, "its 'metrics' is"),
        ({"surprise": 1}, "unknown fields: surprise"),
    ],
)
def test_fields_of_a_wrong_kind_are_named(change, reason, tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(json.loads(result().to_json()) | change))
    with pytest.raises(DataError, match=rf"a\.json.*{reason}"):
        read(tmp_path / "a.json")


def test_every_field_is_needed():
    values = json.loads(result().to_json())
    for name in values.keys() - {"schema"}:
        with pytest.raises(ValueError, match=f"lacks '{name}'"):
            Result.from_json(json.dumps({k: v for k, v in values.items() if k != name}))


def test_folders_are_searched_and_no_file_counts_twice(tmp_path):
    write(result(seed=1), tmp_path / "a" / "1.json")
    write(result(seed=2), tmp_path / "a" / "b" / "2.json")
    (tmp_path / "a" / ".3.json.part").write_text("{")
    (tmp_path / "a" / "notes.txt").write_text("no result")
    found = read_all([tmp_path, tmp_path / "a" / "1.json"])
    assert [r.seed for r in found] == [1, 2]


def test_a_missing_path_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"no file or folder .*nowhere"):
        read_all([tmp_path / "nowhere"])


def test_a_failing_write_leaves_the_old_file_and_no_litter(tmp_path):
    write(result(seed=1), tmp_path / "a.json")
    with pytest.raises(TypeError):
        write(result(recipe={"not": object()}), tmp_path / "a.json")
    assert read(tmp_path / "a.json").seed == 1
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_results import result
from alignattn.results import write
print("go", flush=True)
while True:
    write(result(details={"curve": list(range(20000))}), Path(sys.argv[1]))
"""


def test_a_writer_killed_at_any_moment_leaves_a_whole_file_or_none(tmp_path):
    from pathlib import Path

    for delay in (0.0, 0.01, 0.03, 0.06):
        file = tmp_path / f"{delay}.json"
        command = [sys.executable, "-c", WRITER, str(file), str(Path(__file__).parent)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
            writer.stdout.readline()
            time.sleep(delay)
            os.kill(writer.pid, signal.SIGKILL)
        if file.exists():
            assert read(file).details["curve"][-1] == 19999
    read_all([tmp_path])  # what is left over is no result file
