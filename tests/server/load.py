"""Many clients at once: `python -m tests.server.load`.

Each client replays episodes whose end is known, over HTTP or WebSocket in turn, and compares every observation and the
final latency; one episode in eight is left in the middle, over WebSocket by a client that dies. At the end the server
may have only the sessions that were left over HTTP, which wait for their idleness to end, and its memory is compared
with what it was after the first tenth.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import psutil
from websockets.asyncio.client import connect

from tests.server.serving import KnownEpisode, known_episode, serving

LEFT_IN_THE_MIDDLE = 8
GOODBYE_SECONDS = 30.0
"""In which the server has to notice that a client has died."""


@dataclass(frozen=True)
class Report:
    """What a run came to.

    Attributes:
        episodes, left: played to the end, and left in the middle.
        requests: answered.
        seconds: wall time.
        percentiles: milliseconds of a request at 50, 95, 99 and 100 %.
        memory: bytes of the server after a tenth of the episodes, and at the end.
        sessions: that the server has, beyond those left over HTTP.
    """

    episodes: int
    left: int
    requests: int
    seconds: float
    percentiles: tuple[float, ...]
    memory: tuple[int, int]
    sessions: int

    def __str__(self) -> str:
        times = ", ".join(f"{p} % {ms:.1f}" for p, ms in zip((50, 95, 99, 100), self.percentiles, strict=True))
        before, after = (size / 2**20 for size in self.memory)
        return (
            f"{self.episodes} episodes, {self.left} left in the middle, none lost or crossed\n"
            f"{self.requests} requests in {self.seconds:.1f} s, {self.requests / self.seconds:,.0f} a second\n"
            f"milliseconds a request: {times}\n"
            f"memory {before:.1f} MiB after a tenth, {after:.1f} MiB at the end; sessions too many: {self.sessions}"
        )


Send = Callable[..., Any]


async def _play(episode: KnownEpisode, send: Send, stop_after: int | None) -> None:
    """Play an episode through `send(kind, body) -> answer`; leaves after `stop_after` steps."""
    answer = await send("reset", episode.reset)
    assert answer["observation"] == episode.first, "another episode's observation"
    pairs = zip(episode.actions, episode.observations, strict=True)
    for step, (text, expected) in enumerate(pairs):
        if step == stop_after:
            return
        answer = await send("step", {"command": text})
        assert answer["observation"] == expected, "another episode's observation"
    assert answer["done"]
    assert answer["info"]["total_latency"] == episode.latency
    assert answer["score"] == episode.score


async def _over_http(client: httpx.AsyncClient, episode: KnownEpisode, times: list[float], **how: Any) -> None:
    session_id = ""

    async def send(kind: str, body: dict[str, Any]) -> dict[str, Any]:
        nonlocal session_id
        begin = time.perf_counter()
        response = await client.post("/reset" if kind == "reset" else f"/step/{session_id}", json=body | how["extra"])
        times.append(time.perf_counter() - begin)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        session_id = answer.get("session_id", session_id)
        return answer

    await _play(episode, send, how["stop_after"])
    if how["stop_after"] is None:
        assert (await client.delete(f"/session/{session_id}")).status_code == 200


async def _over_websocket(base: str, episode: KnownEpisode, times: list[float], **how: Any) -> None:
    async with connect(base.replace("http", "ws") + "/ws", open_timeout=120) as socket:

        async def send(kind: str, body: dict[str, Any]) -> dict[str, Any]:
            begin = time.perf_counter()
            await socket.send(json.dumps({"type": kind} | body | how["extra"]))
            answer: dict[str, Any] = json.loads(await socket.recv())
            times.append(time.perf_counter() - begin)
            assert "error" not in answer, answer
            return answer

        await _play(episode, send, how["stop_after"])
        if how["stop_after"] is not None:
            socket.transport.abort()  # the client dies: no goodbye


async def run(base: str, pid: int, *, clients: int, episodes: int, graphs: int, view: bool = False) -> Report:
    """Play, and see that nothing is left."""
    known = [known_episode(seed) for seed in range(graphs)]
    numbers = iter(range(episodes))
    times: list[float] = []
    memory = 0
    left = left_over_http = 0
    begin = time.perf_counter()

    async def work(client: httpx.AsyncClient) -> None:
        nonlocal memory, left, left_over_http
        for number in numbers:
            if number == episodes // 10:
                memory = psutil.Process(pid).memory_info().rss
            leaves = number % LEFT_IN_THE_MIDDLE == 0
            left += leaves
            how = {"stop_after": 2 if leaves else None, "extra": {"view": view}}
            if number // LEFT_IN_THE_MIDDLE % 2:
                left_over_http += leaves
                await _over_http(client, known[number % graphs], times, **how)
            else:
                await _over_websocket(base, known[number % graphs], times, **how)

    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(base_url=base, timeout=120, limits=limits) as client:
        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(work(client))
        seconds = time.perf_counter() - begin
        after = psutil.Process(pid).memory_info().rss
        deadline = time.perf_counter() + GOODBYE_SECONDS
        sessions = -1
        while sessions != 0 and time.perf_counter() < deadline:
            sessions = (await client.get("/health")).json()["sessions"] - left_over_http
            await asyncio.sleep(0.1)
    percentiles = tuple(float(p) * 1000 for p in np.percentile(times, (50, 95, 99, 100)))
    return Report(episodes - left, left, len(times), seconds, percentiles, (memory, after), sessions)


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.server.load", description=__doc__)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--episodes", type=int, default=2000)
    parser.add_argument("--view", action="store_true", help="ask for what the page draws as well")
    args = parser.parse_args(argv)
    with serving() as (base, pid):
        report = asyncio.run(run(base, pid, clients=args.clients, episodes=args.episodes, graphs=60, view=args.view))
    sys.stdout.write(f"{report}\n")
    return 0 if report.sessions == 0 and report.memory[1] < report.memory[0] + 32 * 2**20 else 1


if __name__ == "__main__":
    sys.exit(main())
