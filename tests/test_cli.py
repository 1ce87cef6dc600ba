"""The command, as a user types it."""

import subprocess
import sys

import pytest

from alignattn import cli


def test_help_does_not_wait_for_torch():
    code = "import sys; from alignattn import cli; cli._parser(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_demo_trains_soft_attention_and_the_four_methods(capsys, tmp_path):
    assert cli.main(["demo", "--seeds", "1", "--steps", "2", "--workers", "1", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    rows = [line.split()[0] for line in out.splitlines()[4:9]]
    assert rows == ["soft", "gan", "ot", "ct", "mmd"]
    assert len(list((tmp_path / "digits").glob("*.json"))) == 5
    assert (tmp_path / "table.txt").read_text() in out
    for picture in ("clouds.png", "reliability.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("arguments", [[], ["dmeo"], ["demo", "--seeds", "0"], ["demo", "--steps", "many"]])
def test_bad_arguments_are_refused_with_a_usage_line(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 2
    assert "usage: alignattn" in capsys.readouterr().err


def test_public_names_are_few_and_resolve():
    import alignattn

    assert len(alignattn.__all__) <= 12
    assert all(hasattr(alignattn, name) for name in alignattn.__all__)
    assert dir(alignattn) == sorted(alignattn.__all__)
    with pytest.raises(AttributeError, match="no attribute 'allign'"):
        _ = alignattn.allign
