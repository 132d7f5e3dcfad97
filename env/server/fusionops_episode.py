"""Episodes of `env.fusionops`: texts in, texts out; no drawing, no policies, one rule set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from env.fusionops import TASKS, FusionOpsEnv, Graph, load_task
from env.server.episodes import Episode
from env.server.errors import ServiceError
from env.server.requests import MOST_NODES, ResetRequest, read

REPLAY_FORMAT = "fusionops-replay-1"
_SIDE = 2**20
_LENIENT = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class _Machine(BaseModel):
    model_config = _LENIENT

    fast_memory_capacity: int = Field(ge=0, le=2**50)
    slow_memory_bandwidth: float = Field(ge=1e-6, le=1e15)
    native_granularity: list[int] = Field(min_length=2, max_length=2)


class _Tensor(BaseModel):
    model_config = _LENIENT

    id: int
    width: int = Field(ge=1, le=_SIDE)
    height: int = Field(ge=1, le=_SIDE)


class _Op(BaseModel):
    model_config = _LENIENT

    id: int
    type: str = Field(max_length=20)
    inputs: list[int] = Field(max_length=MOST_NODES)
    outputs: list[int] = Field(max_length=MOST_NODES)
    base_cost: float = Field(ge=0, le=1e15)


class FusionOpsGraphModel(BaseModel):
    """A graph of fusionops, as its `Graph.from_json` reads it."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    id: str = Field("uploaded", max_length=200)
    description: str = Field("", max_length=2000)
    max_steps: int = Field(0, ge=0, le=1000)
    hardware: _Machine
    tensors: list[_Tensor] = Field(max_length=4 * MOST_NODES)
    ops: list[_Op] = Field(min_length=1, max_length=MOST_NODES)


class FusionOpsEpisode(Episode):
    """An episode of `env.fusionops`."""

    name = "fusionops"

    def __init__(self, request: ResetRequest) -> None:
        extra = [name for name in ("random", "real", "rules", "hardware") if name in request.model_fields_set]
        if any(getattr(request, name) for name in extra):
            raise ServiceError(422, f"{extra[0]}: expected task or graph alone in fusionops, found it beside them")
        self.env = FusionOpsEnv(_graph(request))

    @classmethod
    def catalogue(cls) -> dict[str, Any]:
        graphs = {name: load_task(name) for name in TASKS}
        tasks = [
            {"name": name, "nodes": len(graph), "difficulty": "own machine", "description": graph.description}
            for name, graph in graphs.items()
        ]
        return {"tasks": tasks, "presets": [], "real": [], "policies": []}

    def suggest(self, policy: str, observation: str) -> str:
        raise ServiceError(404, f"policy: expected adapter, the only one in fusionops, found {policy!r}")

    def view(self) -> dict[str, Any] | None:
        return None

    def worth(self) -> dict[str, Any]:
        return {"retain": [], "why_not": "the planner knows the scheduler environment, not fusionops"}

    def replay(self, actions: Sequence[str], made_by: str) -> dict[str, Any]:
        return {
            "format": REPLAY_FORMAT,
            "graph": self.env.graph.to_json(),
            "actions": list(actions),
            "made_by": made_by,
        }


def _graph(request: ResetRequest) -> Graph:
    try:
        if request.graph is not None:
            return Graph.from_json(read(FusionOpsGraphModel, request.graph, "graph.").model_dump(exclude_unset=True))
        return load_task(request.task or TASKS[0])
    except ValueError as error:
        raise error if isinstance(error, ServiceError) else ServiceError(422, str(error)) from None
