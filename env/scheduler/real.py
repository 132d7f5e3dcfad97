"""Graphs traced from real networks, as data (made by `env.scheduler.trace`; loading them needs no PyTorch)."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files

from env.scheduler.graph import Graph

REAL_GRAPHS = ("smollm2_135m_layer", "resnet_basic_block", "resnet_bottleneck", "unet_level", "mixer_block")


@cache
def _graphs() -> dict[str, Graph]:
    records = json.loads(files("env.scheduler").joinpath("real.json").read_text(encoding="utf-8"))["graphs"]
    return {record["id"]: Graph.from_json(record) for record in records}


def load_real(name: str) -> Graph:
    """The graph of a real network, on the `medium` preset; `hardware.preset` puts it on another machine.

    Raises:
        ValueError: if there is no real graph of that name.
    """
    if name not in REAL_GRAPHS:
        raise ValueError(f"real graph: expected one of {', '.join(REAL_GRAPHS)}, found {name!r}")
    return _graphs()[name]
