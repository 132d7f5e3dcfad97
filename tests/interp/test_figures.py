"""Figures hold what they are given, come from the frame alone, and are the same bytes every time."""

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure

from interp.figures import COLUMN, STYLE, curve, mark, save, style
from interp.flip import locate
from interp.patching_report import plot
from interp.stats import Interval
from tests.interp.synthetic import planted_frame

FLIPS = {"value": 11.3, "decision": 15.2}


@pytest.fixture(scope="module")
def frame():
    return planted_frame(effects={"base": 0.0, "trained": 12.0}, flips=FLIPS)


def texts_of(axes):
    return [text.get_text() for text in axes.texts]


def test_the_style_ends_with_its_context():
    before = dict(mpl.rcParams)
    with style():
        assert mpl.rcParams["pdf.fonttype"] == 42
    assert dict(mpl.rcParams) == before
    plot(planted_frame(effects={"base": 3.0, "trained": 12.0}, flips=FLIPS))
    assert dict(mpl.rcParams) == before
    assert STYLE["font.size"] >= 7


def test_no_window_system_and_no_pyplot_are_needed(frame):
    import subprocess
    import sys

    code = "import interp.patching_report, sys; assert 'matplotlib.pyplot' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_trained_panel_draws_the_curves_of_the_frame(frame):
    figure = plot(frame)
    base, trained = figure.axes
    located = locate(frame)
    drawn = [np.asarray(line.get_ydata()) for line in trained.lines]
    for position in FLIPS:
        for direction in ("denoise", "noise"):
            expected = located.sweeps["trained", direction].curves[position][0]
            assert any(len(y) == 31 and np.array_equal(y, expected) for y in drawn)
    assert not any(len(np.asarray(line.get_ydata())) == 31 for line in base.lines)
    for position in FLIPS:
        assert f"{located.flip('trained', 'denoise', position).estimate:.1f}" in texts_of(trained)
    assert "transit" in texts_of(trained)
    assert figure.get_figwidth() == COLUMN


def test_a_panel_without_an_effect_says_so_and_draws_nothing(frame):
    base = plot(frame).axes[0]
    assert any("no effect to locate" in text for text in texts_of(base))
    assert not base.lines
    assert not base.collections


def test_the_number_of_pairs_and_graphs_is_stated(frame):
    assert plot(frame).get_suptitle() == "future_uses: 24 pairs of 12 graphs, 95 % bootstrap intervals"


def test_a_transit_that_is_none_is_not_shaded():
    overlapping = planted_frame(effects={"base": 3.0, "trained": 12.0}, flips={"value": 20.0, "decision": 10.0})
    assert "transit" not in texts_of(plot(overlapping).axes[1])


def test_a_handful_of_graphs_draws_a_sentence():
    few = planted_frame(effects={"base": 3.0, "trained": 12.0}, flips=FLIPS, groups=2)
    for axes in plot(few).axes:
        assert any("no claim from 2 graphs" in text for text in texts_of(axes))


@pytest.mark.filterwarnings("error")
def test_saved_files_are_the_same_bytes_and_embed_their_fonts(frame, tmp_path):
    first = [path.read_bytes() for path in save(plot(frame), tmp_path / "a" / "patching")]
    second = [path.read_bytes() for path in save(plot(frame), tmp_path / "b" / "patching")]
    assert first == second
    pdf, png = first
    assert pdf.startswith(b"%PDF")
    assert b"/FontFile2" in pdf
    assert b"/Type3" not in pdf
    assert png.startswith(b"\x89PNG")


def test_a_name_with_a_dot_keeps_it(tmp_path):
    assert [path.name for path in save(Figure(), tmp_path / "ep0.5")] == ["ep0.5.pdf", "ep0.5.png"]


def test_what_is_undefined_is_not_drawn():
    axes = Figure().subplots()
    mark(axes, Interval(np.nan, np.nan, np.nan, 1.0), 0.5, colour="black")
    assert not axes.lines
    mark(axes, Interval(3.0, np.nan, np.nan, 0.0), 0.5, colour="black")
    assert len(axes.lines) == 1
    mark(axes, Interval(3.0, 2.0, 4.0, 0.0), 0.5, colour="black")
    assert len(axes.lines) == 3
    curve(axes, [0, 1], colour="black", band=([0, 0.5], [0.5, 1]))
    assert len(axes.collections) == 1
