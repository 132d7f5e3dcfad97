"""The four fixed tasks of the published environment, as data."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files

from env.fusionops.graph import Graph

TASKS = ("task1_linear", "task2_diamond", "task3_matmul", "task4_multistage")


@cache
def _tasks() -> dict[str, Graph]:
    records = json.loads(files("env.fusionops").joinpath("tasks.json").read_text(encoding="utf-8"))["tasks"]
    return {record["id"]: Graph.from_json(record) for record in records}


def load_task(name: str) -> Graph:
    """The graph of a fixed task.

    Raises:
        ValueError: if there is no task of that name.
    """
    if name not in TASKS:
        raise ValueError(f"task: expected one of {', '.join(TASKS)}, found {name!r}")
    return _tasks()[name]
