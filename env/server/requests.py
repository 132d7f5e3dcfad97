"""What a client may send: strict types and bounds, checked before anything is built from it."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from env.server.errors import ServiceError, first_line

LARGEST_BODY = 64 * 1024
"""Bytes of a request body or a WebSocket message."""
MOST_NODES = 64
LONGEST_COMMAND = 4096
"""Characters. The published parser's search takes time that grows with the square of a text's length."""


Model = TypeVar("Model", bound=BaseModel)


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class ResetRequest(_Strict):
    """Which episode to start. At most one of `task`, `random`, `real` and `graph`; none is the first task.

    Attributes:
        environment: "scheduler" or "fusionops".
        task: name of a fixed task.
        random: a graph of the curriculum at `curriculum_level` (0 to 1), drawn from `seed` (a fresh one if not given).
        real: name of a traced network.
        graph: a graph as JSON, of the environment's own format.
        rules: "documented" or "upstream".
        hardware: name of a preset that replaces the graph's machine.
        seed: of a random graph. Nothing else in an episode is drawn.
        episode_id: the client's own name for the episode, given back with its state.
        view: whether answers carry what the page draws, which takes the planner's time.
    """

    environment: Literal["scheduler", "fusionops"] = "scheduler"
    task: str | None = Field(None, max_length=100)
    random: bool = False
    curriculum_level: float = Field(0.5, ge=0, le=1)
    seed: int | None = Field(None, ge=0, lt=2**63)
    real: str | None = Field(None, max_length=100)
    graph: dict[str, Any] | None = None
    rules: Literal["documented", "upstream"] = "documented"
    hardware: str | None = Field(None, max_length=100)
    episode_id: str | None = Field(None, max_length=255)
    view: bool = True

    @model_validator(mode="after")
    def _one_source(self) -> ResetRequest:
        given = [name for name in ("task", "real", "graph") if getattr(self, name) is not None]
        given += ["random"] * self.random
        if len(given) > 1:
            raise ValueError(f"expected at most one of task, random, real and graph, found {', '.join(given)}")
        return self


class OpenEnvAction(BaseModel):
    """The action of OpenEnv's form of a step."""

    model_config = ConfigDict(extra="ignore")

    command: str = Field(max_length=LONGEST_COMMAND)


class StepRequest(_Strict):
    """The agent's text."""

    command: str = Field(max_length=LONGEST_COMMAND)
    view: bool = True


class SessionStepRequest(BaseModel):
    """A step that names its session in the body: `command`, or OpenEnv's `action` with a `command` in it."""

    model_config = ConfigDict(extra="ignore")

    session_id: str = Field(max_length=100)
    command: str | None = Field(None, max_length=LONGEST_COMMAND)
    action: OpenEnvAction | None = None
    view: bool = True

    @model_validator(mode="after")
    def _one_command(self) -> SessionStepRequest:
        if (self.command is None) == (self.action is None):
            raise ValueError("expected either command or action, found both or neither")
        return self

    @property
    def text(self) -> str:
        """The agent's text."""
        return self.action.command if self.action is not None else self.command or ""


class SuggestRequest(_Strict):
    """Whose answer is asked for."""

    policy: str = Field(max_length=100)


class HardwareModel(_Strict):
    """A machine of the scheduler, within bounds that keep every number finite."""

    fast_mem_capacity: int = Field(ge=1, le=2**50)
    slow_mem_bandwidth: float = Field(le=1e15)
    kernel_launch_cost: float = Field(ge=0, le=1e15)
    max_fusion_depth: int = Field(ge=1, le=MOST_NODES)

    @model_validator(mode="after")
    def _bandwidth(self) -> HardwareModel:
        if self.slow_mem_bandwidth != 0 and self.slow_mem_bandwidth < 1e-6:
            raise ValueError("slow_mem_bandwidth: expected 0 (free traffic) or at least 0.000001, found less")
        return self


class NodeModel(BaseModel):
    """A node of the scheduler; `flops` and `output_bytes` may be given and are then checked."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    id: int = Field(ge=0, lt=MOST_NODES)
    op: str = Field(max_length=20)
    shape: list[int] = Field(min_length=2, max_length=2)
    inputs: list[int] = Field(max_length=MOST_NODES)
    flops: float | None = None
    output_bytes: float | None = None

    @model_validator(mode="after")
    def _sides(self) -> NodeModel:
        if not all(1 <= side <= 2**20 for side in self.shape):
            raise ValueError("shape: expected two sides between 1 and 1048576, found others")
        return self


class GraphModel(BaseModel):
    """A graph of the scheduler, as `Graph.from_json` reads it."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    id: str = Field("uploaded", max_length=200)
    description: str = Field("", max_length=2000)
    hardware: HardwareModel
    nodes: list[NodeModel] = Field(min_length=1, max_length=MOST_NODES)


def read(model: type[Model], record: Any, where: str = "") -> Model:
    """The model of a JSON value.

    Raises:
        ServiceError: 422, if it is none.
    """
    try:
        return model.model_validate(record)
    except ValidationError as error:
        raise ServiceError(422, where + first_line(error.errors(include_url=False, include_input=False))) from None
