"""Pictures as files: equal bytes for equal pictures, whole files or none, and nothing imported too early."""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from alignattn import plots
from alignattn.errors import ConfigError

mpl = pytest.importorskip("matplotlib", reason="pip install 'alignattn[plot]'")
pytest.importorskip("sklearn", reason="pip install 'alignattn[demo]'")

from drawings import BINS, PICTURES, STRANGE, gaussian  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402


@pytest.mark.parametrize("kind", PICTURES)
@pytest.mark.parametrize("suffix", ["png", "svg", "pdf", "SVG"])
def test_equal_input_gives_equal_bytes(tmp_path, suffix, kind):
    once = PICTURES[kind]({"first": "soft", "second": "mmd 0.1"})
    anew = PICTURES[kind]({"first": "soft", "second": "mmd 0.1"})
    other = PICTURES[kind]({"first": "soft", "second": "ot 0.1"})
    for name, picture in {"first": once, "again": once[0].figure, "anew": anew, "other": other}.items():
        plots.save(picture, tmp_path / f"{name}.{suffix}")
    files = {name: (tmp_path / f"{name}.{suffix}").read_bytes() for name in ("first", "again", "anew", "other")}
    assert files["first"] == files["again"] == files["anew"] != files["other"]
    assert files["first"].startswith({"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[suffix.lower()])
    assert b"<dc:date>" not in files["first"] and b"CreationDate" not in files["first"]


def test_tsne_gives_equal_bytes_too(tmp_path):
    for name in ("first", "again"):
        plots.save(plots.clouds({"soft": (gaussian(20), gaussian(20, seed=1))}), tmp_path / f"{name}.png")
    assert (tmp_path / "first.png").read_bytes() == (tmp_path / "again.png").read_bytes()


def test_a_picture_is_readable_by_those_who_may_read_the_folder(tmp_path):
    (tmp_path / "plain").write_text("")
    plots.save(plots.reliability({"soft": BINS}), str(tmp_path / "new" / "a.png"))
    assert (tmp_path / "new" / "a.png").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("broken", [(Figure, "savefig"), (os, "fsync"), (Path, "replace")])
def test_a_failed_save_leaves_the_old_file_and_no_other(tmp_path, monkeypatch, broken):
    path = tmp_path / "a.png"
    path.write_text("old")
    figure = plots.reliability({"soft": BINS})

    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(*broken, fail)
    with pytest.raises(OSError, match="disk full"):
        plots.save(figure, path)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_nothing_is_imported_before_it_is_needed_and_pyplot_never(tmp_path):
    script = """
import sys
from alignattn import plots
assert not {"matplotlib", "sklearn"} & set(sys.modules)
plots.clouds({"": ([[0.0, 1.0]], [[1.0, 2.0]])})
assert "sklearn" not in sys.modules, "two points need no t-SNE"
plots.save(plots.clouds({"": ([[0.0, 1.0]] * 9, [[i, i * i] for i in range(9)])}), sys.argv[1])
assert "sklearn" in sys.modules and "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "a.svg")], check=True)


def test_axes_a_list_of_them_a_subfigure_and_a_figure_are_one_picture(tmp_path):
    axes = plots.reliability({"a": BINS, "b": BINS})
    for name, picture in {"one": axes[1], "all": axes, "figure": axes[0].figure}.items():
        plots.save(picture, tmp_path / f"{name}.png")
    assert len({(tmp_path / f"{name}.png").read_bytes() for name in ("one", "all", "figure")}) == 1
    figure = Figure()
    upper, _ = figure.subfigures(2)
    plots.save(plots.reliability({"a": BINS}, axes=upper.subplots()), tmp_path / "sub.png")
    plots.save(figure, tmp_path / "whole.png")
    assert (tmp_path / "sub.png").read_bytes() == (tmp_path / "whole.png").read_bytes()


def test_what_is_no_picture_or_two_is_refused(tmp_path):
    for wrong in (None, [], ["a"], 3):
        with pytest.raises(ConfigError, match=r"save\(\) takes axes or a figure, got"):
            plots.save(wrong, tmp_path / "a.png")
    two = [*plots.reliability({"a": BINS}), *plots.reliability({"a": BINS})]
    with pytest.raises(ConfigError, match="these axes belong to 2"):
        plots.save(two, tmp_path / "a.png")
    with pytest.raises(ConfigError, match=r"Unknown picture format 'gif'. Choose one of: png, svg, pdf"):
        plots.save(Figure(), tmp_path / "a.gif")


@pytest.mark.parametrize("kind", PICTURES)
@pytest.mark.parametrize("settings", [{}, {"svg.fonttype": "none"}])
def test_an_svg_is_well_formed_holds_no_script_and_needs_no_font(tmp_path, kind, settings):
    with mpl.rc_context(settings):
        plots.save(PICTURES[kind]({"first": STRANGE[0], "second": STRANGE[1]}), tmp_path / "a.svg")
    tags = {element.tag.rpartition("}")[2] for element in ET.parse(tmp_path / "a.svg").iter()}
    assert "path" in tags and not tags & {"script", "text"}
