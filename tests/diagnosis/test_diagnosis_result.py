"""The file of a diagnosis: read as it was written, and refused where it is not one."""

import json
import math
from dataclasses import replace

import pytest
from made_diagnoses import diagnosis, head

from alignattn.diagnosis.result import Diagnosis, read, write
from alignattn.errors import DataError


def test_it_is_read_as_it_was_written(tmp_path):
    heads = [head(0, auc_interval=(0.1, 0.2)), head(1, mean_distance=math.inf), head(2, layer="NaN")]
    whole = diagnosis(
        *heads, words=["NaN"], settings={"seed": 1, "text": ["a"]}, versions={"torch": "2"}, commit=None, command="c"
    )
    write(whole, tmp_path / "deep" / "one.json")
    assert read(tmp_path / "deep" / "one.json") == whole
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["one.json"]


def test_nan_is_kept():
    found = Diagnosis.from_json(diagnosis(head(auc=math.nan, auc_interval=(math.nan, math.nan))).to_json()).heads[0]
    assert math.isnan(found.auc) and all(map(math.isnan, found.auc_interval))


def changed(**values):
    return json.dumps(json.loads(diagnosis().to_json()) | values)


def with_head(**values):
    plain = json.loads(diagnosis().to_json())
    return json.dumps(plain | {"heads": [plain["heads"][0] | values]})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", r"it is no JSON \(line 1"),
        ("[]", "its kind is not 'diagnosis'"),
        ('{"schema": 1, "name": "a result"}', "its kind is not 'diagnosis'"),
        (changed(schema=99), "its schema is 99 and this alignattn reads up to 1: install a newer one"),
        (changed(schema="1"), "its schema is '1', which is no version"),
        (changed(colour="red"), "it has unknown fields: colour"),
        (changed(name=3), "it has 3 for 'name'"),
        (changed(heads=[7]), "its head 0 is 7"),
        (changed(heads=[]), "it has no heads"),
        (changed(words=["so", 7]), "it has 7 among its words"),
        (with_head(mmd="much"), "its head 0 has 'much' for 'mmd'"),
        (with_head(samples=True), "its head 0 has True for 'samples'"),
        (with_head(noise=[1]), r"its head 0 has \[1\] for 'noise', which is no interval"),
        (with_head(hue=1), "its head 0 has unknown fields: hue"),
        ('{"kind": "diagnosis", "schema": 1}', "it lacks 'name'"),
    ],
)
def test_what_is_wrong_is_said_with_the_name_of_the_file(tmp_path, text, told):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(DataError, match=rf"x\.json cannot be read as a diagnosis: {told}"):
        read(tmp_path / "x.json")


def test_files_that_are_not_there_or_cannot_be_written(tmp_path):
    with pytest.raises(DataError, match="No such file"):
        read(tmp_path / "none.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        write(diagnosis(), tmp_path / "file" / "inside.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="it is no text"):
        read(tmp_path / "bytes.json")


def test_a_difference_is_beyond_noise_above_it_and_not_below():
    assert head(mmd=0.02).beyond_noise
    assert not head(mmd=0.01).beyond_noise and not head(mmd=-0.5).beyond_noise
    assert not head(mmd=0.01 + 1e-7).beyond_noise  # a rounding


def test_within_noise_is_neither_beyond_it_nor_below():
    assert [head(mmd=mmd).within_noise for mmd in (-0.02, -0.01, 0.0, 0.01, 0.02)] == [False, True, True, True, False]
    assert head(mmd=0.01 + 1e-7).within_noise and not head(mmd=math.nan).within_noise


def test_the_share_of_means_is_that_of_the_distance_of_two_gaussians():
    # In one dimension N(0, 1) and N(m, s²) are m² + (1 - s)² apart (Fréchet); with s near 1, nearly that.
    m, s = 0.1, 1.1
    pooled = (1 + s**2) / 2
    one = head(mean_distance=m / math.sqrt(pooled), covariance_distance=(s**2 - 1) / pooled)
    assert one.share_of_means == pytest.approx(m**2 / (m**2 + (1 - s) ** 2), abs=0.01)
    assert replace(one, mean_distance=0.0, covariance_distance=0.0).share_of_means == 0.0
    assert replace(one, mean_distance=math.inf).share_of_means == 1.0
