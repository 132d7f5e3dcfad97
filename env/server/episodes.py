"""The environments behind the service: what each offers, and how one episode of it is started, drawn and advised."""

from __future__ import annotations

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from env.scheduler import (
    PRESETS,
    REAL_GRAPHS,
    TASKS,
    Graph,
    SchedulerEnv,
    curriculum_graph,
    load_real,
    load_task,
    preset,
)
from env.scheduler.boundary import PlannerError
from env.scheduler.hardware import DIFFICULTIES
from env.scheduler.planner import best_action
from env.scheduler.policies import greedy, heuristic, naive
from env.scheduler.replay import Replay
from env.scheduler.rules import DOCUMENTED
from env.scheduler.view import value_table, view, why_no_planner, worth
from env.server.errors import ServiceError
from env.server.requests import GraphModel, ResetRequest, read


class Episode(ABC):
    """One episode of any environment, as the service sees it. `copy` gives a snapshot that another thread may read."""

    name: str
    env: Any

    @abstractmethod
    def __init__(self, request: ResetRequest) -> None:
        """The episode that a request asks for, not yet started; ServiceError if it cannot be."""

    @classmethod
    @abstractmethod
    def catalogue(cls) -> dict[str, Any]:
        """What can be asked for: `tasks` (`name`, `nodes`, `difficulty`, `description`), `presets`, `real` and
        `policies`, each a list."""

    def start(self) -> str:
        """The first observation."""
        observation: str = self.env.reset()[0]
        return observation

    def step(self, command: str) -> tuple[str, float, bool, dict[str, Any]]:
        """Observation, reward, done, info."""
        observation, reward, terminated, truncated, info = self.env.step(command)
        return observation, reward, terminated or truncated, info

    @property
    def score(self) -> float:
        """The score of what has been done so far, in the environment's unit."""
        return float(self.env.score)

    def copy(self) -> Episode:
        """An independent copy in the same state."""
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        copy.env = self.env.clone()
        return copy

    @abstractmethod
    def suggest(self, policy: str, observation: str) -> str:
        """The text that a policy would answer now; ServiceError if there is none."""

    @abstractmethod
    def view(self) -> dict[str, Any] | None:
        """What the page draws; None where there is no drawing."""

    @abstractmethod
    def worth(self) -> dict[str, Any]:
        """What keeping each tensor is worth now."""

    @abstractmethod
    def replay(self, actions: Sequence[str], made_by: str) -> dict[str, Any]:
        """The episode as a file."""


class SchedulerEpisode(Episode):
    """An episode of `env.scheduler`."""

    name = "scheduler"
    policies = ("naive", "greedy", "heuristic", "planner")

    def __init__(self, request: ResetRequest) -> None:
        graph = _graph(request)
        try:
            if request.hardware is not None:
                graph = preset(request.hardware, graph)
            self.env = SchedulerEnv(graph, request.rules)
        except ValueError as error:  # GraphError among them
            raise ServiceError(422, str(error)) from None

    @classmethod
    def catalogue(cls) -> dict[str, Any]:
        return {
            "tasks": [_listed(load_task(name), difficulty) for name, difficulty in _task_difficulties().items()],
            "presets": list(PRESETS),
            "real": list(REAL_GRAPHS),
            "policies": list(cls.policies),
        }

    def suggest(self, policy: str, observation: str) -> str:
        episode = self.env.episode
        match policy:
            case "naive":
                return naive(episode).to_text()
            case "greedy":
                return greedy(episode).to_text()
            case "heuristic":
                if self.env.rules is not DOCUMENTED:
                    raise ServiceError(409, "heuristic: expected the documented rules' observation, found upstream's")
                return heuristic(json.loads(observation)).to_text()
            case "planner":
                if (reason := why_no_planner(self.env)) is not None:
                    raise ServiceError(409, f"planner: {reason}")
                try:
                    return best_action(value_table(self.env.graph), episode).to_text()
                except PlannerError as error:
                    raise ServiceError(409, f"planner: {error}") from None
        raise ServiceError(422, f"policy: expected one of {', '.join(self.policies)} and adapter, found {policy!r}")

    def view(self) -> dict[str, Any] | None:
        return view(self.env)

    def worth(self) -> dict[str, Any]:
        return worth(self.env)

    def replay(self, actions: Sequence[str], made_by: str) -> dict[str, Any]:
        return Replay(self.env.graph, self.env.rules.name, tuple(actions), made_by).to_json()


def _graph(request: ResetRequest) -> Graph:
    try:
        if request.graph is not None:
            return Graph.from_json(read(GraphModel, request.graph, "graph.").model_dump(exclude_unset=True))
        if request.real is not None:
            return load_real(request.real)
        if request.random:
            seed = secrets.randbelow(2**31) if request.seed is None else request.seed
            name = f"curriculum-{request.curriculum_level:g}-s{seed}"
            return curriculum_graph(request.curriculum_level, rng=np.random.default_rng(seed), name=name)
        return load_task(request.task or TASKS[0])
    except ValueError as error:
        raise error if isinstance(error, ServiceError) else ServiceError(422, str(error)) from None


def _task_difficulties() -> dict[str, str]:
    """By task, the published preset whose machine it has."""
    found = {}
    for name in TASKS:
        graph = load_task(name)
        found[name] = next((d for d in DIFFICULTIES if preset(d, graph).hardware == graph.hardware), "own machine")
    return found


def _listed(graph: Graph, difficulty: str) -> dict[str, Any]:
    return {"name": graph.id, "nodes": len(graph), "difficulty": difficulty, "description": graph.description}
