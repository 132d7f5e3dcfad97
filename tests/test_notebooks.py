"""The notebooks run from the saved tables, and what they show is what the tables say."""

import re
from pathlib import Path

import nbformat
import pytest

from notebooks.execute import execute

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
# Trains a model: its numbers are those of the processor that it runs on.
TRAINS = "08_your_own_adapter"
# What a notebook reads beside reports/environment and reports/imitation.
TABLES = {
    "07_the_plateau": [
        "training/published/summary.json",
        "training/bandwidth-bound/summary.json",
        "ep400/verdict.json",
        "bandwidth-bound/ep400/verdict.json",
    ]
}
TEXTS = ("text/plain", "text/markdown", "text/html")


def skip_without_tables(path):
    missing = [name for name in TABLES.get(path.stem, ()) if not (FOLDER.parent / "reports" / name).exists()]
    if missing:
        pytest.skip(f"no tables yet: {', '.join(missing)}")


def outputs(notebook):
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def texts(notebook):
    """What can be read in the outputs; the address of an object is no result."""
    return [
        {kind: output.data[kind] for kind in TEXTS if kind in output.data}
        for output in outputs(notebook)
        if "data" in output
    ]


def test_there_are_eight():
    assert [path.name[:2] for path in NOTEBOOKS] == [f"{number:02d}" for number in range(1, 9)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_saved_with_all_outputs_and_none_of_the_machine(path):
    skip_without_tables(path)
    notebook = nbformat.read(path, as_version=4)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert {output.output_type for output in outputs(notebook)} <= {"display_data", "execute_result"}
    assert not re.search(r"/(?:work|tmp|home|root|usr|opt)/|0x[0-9a-f]{6}", str(texts(notebook)))
    assert path.stat().st_size < 400_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_reads_saved_tables_unless_it_is_told_otherwise(path):
    """It begins with what will be known at its end; the switch is in its first code cell, and off."""
    cells = nbformat.read(path, as_version=4).cells
    assert cells[0].cell_type == "markdown"
    assert "**At the end of this page you" in cells[0].source
    assert re.search(r"^RECOMPUTE = False  # True: ", next(c for c in cells if c.cell_type == "code").source, re.M)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_and_shows_what_is_saved(path):
    skip_without_tables(path)
    found = execute(path)
    assert {output.output_type for output in outputs(found)} <= {"display_data", "execute_result"}, outputs(found)
    saved = nbformat.read(path, as_version=4)
    if path.stem == TRAINS:
        assert len(texts(found)) == len(texts(saved))
    else:
        assert texts(found) == texts(saved), f"python notebooks/execute.py {path.name} brings it up to date"
