"""Run notebooks and keep their outputs, without what differs from one run to the next.

    python notebooks/execute.py
    python notebooks/execute.py notebooks/04_flip_layers.ipynb

No timestamps, no versions of the kernel: where the tables are the same, so is the file.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

FOLDER = Path(__file__).resolve().parent
TIMEOUT = 1800  # seconds a cell
# Libraries draw progress bars as widgets, and warn where there are none; saved outputs have no use for them.
QUIET = "ignore:IProgress not found"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def execute(path: Path) -> NotebookNode:
    """The notebook with the outputs of a fresh kernel, in which the packages of this checkout are imported.

    Raises:
        CellExecutionError: if a cell raises.
    """
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=TIMEOUT, record_timing=False, resources={"metadata": {"path": str(path.parent)}}
    )
    client.execute(env=os.environ | {"PYTHONPATH": str(FOLDER.parent), "PYTHONWARNINGS": QUIET})
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        cell.metadata = NotebookNode()
    return notebook


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status: 0 done, 2 if a notebook cannot be run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", type=Path, nargs="*", metavar="FILE", help="default: all in this folder")
    options = parser.parse_args(argv)
    for path in options.notebooks or sorted(FOLDER.glob("*.ipynb")):
        try:
            executed = execute(path)
        except (CellExecutionError, OSError) as error:
            sys.stderr.write(f"error: {path}: {error}\n")
            return 2
        nbformat.write(executed, path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
