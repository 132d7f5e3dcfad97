"""The pairs of a run, shared out over a Ray cluster; every worker holds the model once.

A worker loads the subject by itself, from the adapter's folder and the base. What it is to measure is pickled with a
mark in the place of the subject, and the worker puts its own there; no analysis needs to know of it.

Results. A worker runs the same code on the same tokens, one pair at a time, so on machines of one kind and with the
same number of threads the numbers are those of a local run with that `--threads`, to the bit. Another number of
threads, or another kind of processor, may add in another order.

Failures. A pair whose worker dies is given to the next one that is free, `ATTEMPTS` times in all, and the worker is
replaced; a worker that dies before it has loaded the model is not. An error of the analysis itself is not tried again:
it ends the run as it would end a local one. Every frame is handed over as soon as it arrives, to be kept for --resume.

Every machine needs this package in the same versions, which is checked, as the contents of adapter and base are; the
adapter's folder, and a base that is a folder, under the same path. A base with a name is fetched or found by each.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
import ray
from ray._private.utils import read_ray_address
from ray.exceptions import RayError, RayTaskError

from interp import cli
from interp.engines import RAY, Measure
from interp.ray_worker import Recipe, Refusal, Worker, dumps

ATTEMPTS = 3  # how many workers may die of the same pair before it is to blame
CONNECT_SECONDS = 5


class Ray:
    """The workers of a cluster; see the module."""

    def __init__(self, args: argparse.Namespace, setting: Mapping[str, Any]) -> None:
        self.args = args
        self.setting = setting
        self._measured_by: set[str] = set()

    def measure(self, function: Measure, items: Sequence[Any]) -> Iterator[tuple[int, pd.DataFrame]]:
        """(index of the item, its frame) as they arrive; the cluster works from the call on.

        Raises:
            InputError: if there is no cluster, no worker, or none is left; if a pair cost `ATTEMPTS` of them; and in
                the place of every other error that a user can mend, with its message.
        """
        if not items:
            return iter(())
        workers = workers_for(Recipe.of(self.args, self.setting), self.args)
        workers.start(len(items))
        return self._counted(workers.measure(dumps(function), [dumps(item) for item in items]))

    def record(self) -> dict[str, Any]:
        """Name, and how many workers measured something; the threads of each are those of the record itself."""
        return {"name": RAY, "workers": len(self._measured_by)}

    def _counted(self, found: Iterator[tuple[int, str, pd.DataFrame]]) -> Iterator[tuple[int, pd.DataFrame]]:
        for index, worker, frame in found:
            self._measured_by.add(worker)
            yield index, frame


class Workers:
    """The workers that hold one subject, kept from one analysis to the next."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        gpus = 1 if recipe.device == "cuda" else 0
        self._actor = ray.remote(num_cpus=recipe.threads, num_gpus=gpus, max_restarts=0)(Worker)
        self._idle: list[Any] = []
        self._starting: dict[Any, Any] = {}  # reference of what `load` returns -> worker
        self._busy: dict[Any, tuple[Any, int]] = {}  # reference of a frame -> worker, index of the item

    def start(self, wanted: int) -> None:
        """Let there be as many workers as the cluster has places for, `wanted` of them at most.

        Raises:
            InputError: if there is no place for any.
        """
        places = capacity(self.recipe)
        if places < 1:
            need = f"{self.recipe.threads} CPUs" + (" and a GPU" if self.recipe.device == "cuda" else "")
            raise cli.InputError(f"--engine {RAY}: expected a machine with {need} in the cluster, found none")
        for _ in range(min(wanted, places) - len(self._idle) - len(self._starting)):
            self._start_one()

    def measure(self, function: bytes, items: Sequence[bytes]) -> Iterator[tuple[int, str, pd.DataFrame]]:
        """(index, the worker's name, frame) of every item, as they arrive."""
        work = [ray.put(function)]
        waiting, deaths = deque(range(len(items))), Counter[int]()
        try:
            while waiting or self._busy:
                while waiting and self._idle:
                    worker, index = self._idle.pop(), waiting.popleft()
                    self._busy[worker.measure.remote(work, items[index])] = worker, index
                (done, *_), _ = ray.wait([*self._busy, *self._starting])
                if done in self._starting:
                    self._started(done)
                    continue
                worker, index = self._busy.pop(done)
                self._idle.append(worker)
                try:
                    frame = _result(done)
                except _Death as death:
                    self._idle.remove(worker)
                    deaths[index] += 1
                    if deaths[index] == ATTEMPTS:
                        raise _given_up(f"measuring one pair cost {ATTEMPTS} workers", death) from None
                    waiting.appendleft(index)
                    ray.kill(worker)  # it may only be out of reach
                    self._start_one()
                else:
                    yield index, worker._actor_id.hex(), frame
        finally:
            for worker, _ in self._busy.values():  # none, unless something went wrong
                ray.kill(worker)
            self._busy = {}

    def close(self) -> None:
        """End them all."""
        for worker in (*self._idle, *self._starting.values()):
            ray.kill(worker)
        self._idle, self._starting = [], {}

    def _start_one(self) -> None:
        worker = self._actor.remote()
        self._starting[worker.load.remote(self.recipe)] = worker

    def _started(self, done: Any) -> None:
        worker = self._starting.pop(done)
        try:
            _result(done)
        except _Death as death:
            if not (self._idle or self._starting or self._busy):
                raise _given_up("no worker is left", death) from None
        else:
            self._idle.append(worker)


_kept: dict[Recipe, Workers] = {}  # one at most: two would wait for each other's places


def workers_for(recipe: Recipe, args: argparse.Namespace) -> Workers:
    """The workers that hold this subject, if they are there, or else new ones, in the place of those before."""
    connect(args)
    if recipe not in _kept:
        close()
        _kept[recipe] = Workers(recipe)
    return _kept[recipe]


def close() -> None:
    """End the workers that are kept."""
    while _kept:
        _kept.popitem()[1].close()


def connect(args: argparse.Namespace) -> None:
    """Join the cluster at RAY_ADDRESS, or the one that runs on this machine, or start one here; and say which.

    Raises:
        InputError: if the cluster cannot be joined.
    """
    if ray.is_initialized():
        return
    address = _running_cluster()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    try:
        ray.init(None if address else "local", **options)  # None: as found, with the token that such a cluster may ask
    except (OSError, ValueError, RuntimeError, RayError) as error:
        where = f"to join the cluster at {address}" if address else "to start a cluster here"
        raise cli.InputError(f"--engine {RAY}: expected {where}, found {_first_line(error)}") from error
    cpus, gpus = (int(ray.cluster_resources().get(kind, 0)) for kind in ("CPU", "GPU"))
    where = f"at {address}" if address else "started on this machine"
    cli.say(args, f"Ray cluster {where}: {cpus} CPUs, {gpus} GPUs")


def _running_cluster() -> str | None:
    """host:port of the cluster to join, tried first: Ray itself would go on for minutes where none answers."""
    given = os.environ.get("RAY_ADDRESS")
    if not given:
        noted = read_ray_address()
        return noted if noted and _no_answer(noted) is None else None  # a crashed cluster's note stays behind
    host, _, port = given.rpartition(":")
    if not port.isdecimal() or "/" in host:  # ray://…: a client, which is not in the cluster
        raise cli.InputError(f"RAY_ADDRESS: expected host:port of a cluster that this machine is in, found {given!r}")
    if problem := _no_answer(given):
        raise cli.InputError(f"RAY_ADDRESS: expected a Ray cluster at {given}, found {problem}")
    return given


def _no_answer(address: str) -> OSError | None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        return error
    return None


def capacity(recipe: Recipe) -> int:
    """How many workers fit into the cluster if nothing else runs there: by CPUs, `threads` each, and a GPU each."""
    fitting = 0
    for node in ray.nodes():
        if node["Alive"]:
            by_cpu = int(node["Resources"].get("CPU", 0)) // recipe.threads
            fitting += min(by_cpu, int(node["Resources"].get("GPU", 0))) if recipe.device == "cuda" else by_cpu
    return fitting


class _Death(Exception):
    """A worker is gone, or its answer is."""


def _result(done: Any) -> Any:
    """What a worker answered; a bug there is raised here, with the worker's traceback in its message."""
    try:
        found = ray.get(done)
    except RayTaskError:
        raise
    except RayError as error:
        raise _Death(_first_line(error)) from error
    if isinstance(found, Refusal):
        raise cli.InputError(found.message)
    return found


def _given_up(what: str, death: _Death) -> cli.InputError:
    return cli.InputError(f"--engine {RAY}: {what}: is the memory of a machine too small? The last one: {death}")


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
