"""An alignment in a folder: all of it or nothing, and never a pickle."""

import copy
import hashlib
import json

import pytest
import torch

import alignattn
from alignattn import Alignment
from alignattn.errors import AlignmentError, ConfigError, DataError
from alignattn.matching.matcher import MatcherConfig


def steps(model, alignment, batch, count):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(count):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    return alignment


@pytest.fixture
def still(bert):
    """Without dropout, so that two trainings can be compared."""
    for module in bert.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return bert


@pytest.mark.parametrize("method", ["gan", "ct", "ot", "mmd"])
def test_what_was_saved_goes_on_as_if_nothing_had_happened(still, batch, method, tmp_path):
    alignment = alignattn.align(still, method, weight=alignattn.Ramp(0.4, steps=5), layers=[0, 2], seed=7)
    steps(still, alignment, batch, 3)
    alignment.save(tmp_path / "a")
    weights = {name: value.clone() for name, value in still.state_dict().items()}
    steps(still, alignment, batch, 3)
    expected = {name: value.clone() for name, value in still.state_dict().items()}
    networks = [p.clone() for p in alignment.matcher.parameters()]
    alignment.detach()

    still.load_state_dict(weights)
    again = Alignment.load(still, tmp_path / "a")
    assert again.config == alignment.config and again.steps == 3
    assert [site.name for site in again._tap.sites] == [f"bert.encoder.layer.{i}.attention.self" for i in (0, 2)]
    steps(still, again, batch, 3)
    for name, value in expected.items():
        assert torch.equal(still.state_dict()[name], value), name
    for one, other in zip(networks, again.matcher.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_folder_holds_two_small_files_and_no_pickle(bert, batch, tmp_path):
    alignment = alignattn.align(bert, "gan")
    steps(bert, alignment, batch, 1)
    alignment.save(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["alignment.json", "alignment.safetensors"]
    assert (tmp_path / "alignment.safetensors").stat().st_size < 100_000
    for file in tmp_path.iterdir():
        assert b"\x80\x04" not in file.read_bytes()[:2] and b"PK" not in file.read_bytes()[:2]


def test_nothing_of_a_damaged_or_foreign_folder_is_loaded(bert, batch, tmp_path, encoder):
    alignment = alignattn.align(bert, "gan")
    steps(bert, alignment, batch, 2)
    alignment.save(tmp_path / "good")
    before = copy.deepcopy(alignment.state_dict())
    settings = json.loads((tmp_path / "good" / "alignment.json").read_text())
    tensors = (tmp_path / "good" / "alignment.safetensors").read_bytes()

    def folder(change=None, packed=tensors, text=None):
        target = tmp_path / f"bad{len(list(tmp_path.iterdir()))}"
        target.mkdir()
        values = settings | {"tensors": hashlib.sha256(packed).hexdigest()} | (change or {})
        (target / "alignment.json").write_text(json.dumps(values) if text is None else text)
        (target / "alignment.safetensors").write_bytes(packed)
        return target

    missing = tmp_path / "missing"
    missing.mkdir()
    for bad, message in [
        (missing, r"holds no alignment: there is no alignment\.json"),
        (tmp_path / "nowhere", "holds no alignment"),
        (folder(text="{"), "cannot be read as the settings"),
        (folder(text="[]"), "cannot be read as the settings"),
        (folder({"format": 2}), "has format 2, and this version of alignattn reads 1"),
        (folder({"tensors": "0" * 64}), "one of them was replaced"),
        (folder(packed=tensors[:-10]), "damaged"),
        (folder(packed=b"nonsense"), "damaged"),
        (folder({"config": {"method": "gan"}}), "damaged"),
        (folder({"rows": [[1]]}), "damaged"),
        (folder({"config": settings["config"] | {"method": "mmd"}}), "of method 'mmd'"),
    ]:
        with pytest.raises(AlignmentError, match=message):
            alignment.restore(bad)
        for name, value in before["networks"].items():
            assert torch.equal(alignment.state_dict()["networks"][name], value)
        assert alignment.steps == 2
    wide = json.loads(json.dumps(settings))
    wide["config"]["matcher"]["hidden_width"] = 3
    alignment.detach()
    with pytest.raises(ConfigError, match="does not fit"):
        Alignment.load(bert, folder(wide))
    assert alignattn.align(bert, "gan").detach() is None  # the failed load left nothing attached
    with pytest.raises(DataError, match=r"is of another model: it has bert\.encoder\.layer\.0"):
        Alignment.load(encoder, tmp_path / "good")


def test_what_a_file_cannot_hold_is_refused(bert, tmp_path):
    alignment = alignattn.align(bert, "gan", weight=lambda step: 0.1)
    with pytest.raises(ConfigError, match=r"function of your own.*alignattn\.Ramp"):
        alignment.save(tmp_path / "a")
    alignment.detach()

    class Mine(alignattn.Matcher):
        def losses(self, query, key, query_mask, key_mask, names):
            return (query - key).square().mean((-1, -2))

    with pytest.raises(ConfigError, match="matcher of your own"):
        Alignment(Mine(MatcherConfig())).save(tmp_path / "b")
    assert not (tmp_path / "a" / "alignment.json").exists()


def test_save_pretrained_attached_is_a_plain_checkpoint(bert, batch, tmp_path, caplog):
    from transformers import BertForSequenceClassification

    alignment = alignattn.align(bert, "gan")
    steps(bert, alignment, batch, 1)
    bert.save_pretrained(tmp_path / "attached")
    alignment.detach()
    bert.save_pretrained(tmp_path / "detached")
    names = sorted(file.name for file in (tmp_path / "attached").iterdir())
    assert names == sorted(file.name for file in (tmp_path / "detached").iterdir())
    for name in names:
        assert (tmp_path / "attached" / name).read_bytes() == (tmp_path / "detached" / name).read_bytes()
    loaded, info = BertForSequenceClassification.from_pretrained(tmp_path / "attached", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not caplog.records
    assert loaded.state_dict().keys() == bert.state_dict().keys()
