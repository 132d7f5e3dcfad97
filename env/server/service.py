"""What the service does, whatever protocol it is asked in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from env.server.catalogue import catalogue, start_episode
from env.server.errors import ServiceError
from env.server.requests import ResetRequest
from env.server.sessions import Session, Sessions

Answer = Callable[[str, str], str]
"""A trained adapter as a player: name of the environment, observation -> the action's text."""
T = TypeVar("T")

IDLE_SECONDS = 600.0
MOST_SESSIONS = 1024
PLANNER_SECONDS = 20.0
PLAYER_SECONDS = 180.0
PLANNER_THREADS = 2


class Busy(ServiceError):
    """A thread had no time."""


class Service:
    """Sessions and what can be asked of them.

    A step of an environment takes microseconds and is taken in the event loop, so that it is never half done. The
    planner and a model work in threads of their own, on a copy of the episode, for a bounded time. A thread cannot be
    stopped: `planner_work.MOST_PLANNER_WORK` bounds the planner's work; the time bounds how long a client waits.

    Args:
        answer: plays for "adapter" in `suggest`.
        idle_seconds, most_sessions, clock: see `Sessions`.
    """

    def __init__(
        self,
        answer: Answer | None = None,
        *,
        idle_seconds: float = IDLE_SECONDS,
        most_sessions: int = MOST_SESSIONS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.answer = answer
        self.sessions = Sessions(idle_seconds=idle_seconds, most=most_sessions, clock=clock)
        self._planner = ThreadPoolExecutor(PLANNER_THREADS, thread_name_prefix="planner")
        self._player = ThreadPoolExecutor(1, thread_name_prefix="player")

    def close(self) -> None:
        """End the threads; what has not begun is not begun."""
        self._planner.shutdown(wait=False, cancel_futures=True)
        self._player.shutdown(wait=False, cancel_futures=True)

    def tasks(self) -> dict[str, Any]:
        """What can be asked for, by environment."""
        environments = catalogue()
        return {
            "environments": environments,
            "tasks": [task["name"] for task in environments["scheduler"]["tasks"]],
            "adapter": self.answer is not None,
        }

    async def reset(self, request: ResetRequest) -> dict[str, Any]:
        """Start an episode in a session of its own."""
        episode, observation = await self._plan(start_episode, request)
        session = Session(episode, observation, request.episode_id)
        self.sessions.add(session)
        return {
            "session_id": session.id,
            "observation": observation,
            "done": False,
            "reward": 0.0,
            "view": await self._view(session, request.view),
        }

    async def step(self, session_id: str, command: str, *, view: bool = True) -> dict[str, Any]:
        """Take a step."""
        async with self.sessions.using(session_id) as session:
            answer = session.step(command)
            answer["view"] = await self._view(session, view)
        return answer

    async def state(self, session_id: str, *, view: bool = True) -> dict[str, Any]:
        """What the last answer said, and the texts so far."""
        async with self.sessions.using(session_id) as session:
            return {
                "session_id": session.id,
                "episode_id": session.episode_id,
                "environment": session.episode.name,
                "observation": session.observation,
                "done": session.done,
                "score": session.episode.score if session.done else None,
                "actions": list(session.actions),
                "view": await self._view(session, view),
            }

    async def suggest(self, session_id: str, policy: str) -> dict[str, Any]:
        """What a policy would answer now."""
        async with self.sessions.using(session_id) as session:
            if session.done:
                raise ServiceError(409, "suggest: expected an episode in play, found its end")
            if policy != "adapter":
                text = await self._plan(session.episode.copy().suggest, policy, session.observation)
            elif self.answer is None:
                raise ServiceError(404, "adapter: none is loaded; start the server with --adapter DIR")
            else:
                work = self._player, PLAYER_SECONDS, self.answer, session.episode.name, session.observation
                text = await _bounded(*work)
            session.suggestion = (policy, text)
        return {"command": text}

    async def worth(self, session_id: str) -> dict[str, Any]:
        """What keeping each tensor is worth now."""
        async with self.sessions.using(session_id) as session:
            return await self._plan(session.episode.copy().worth)

    def replay(self, session_id: str) -> dict[str, Any]:
        """The episode as a file."""
        session = self.sessions.get(session_id)
        return session.episode.replay(session.actions, session.made_by)

    def delete(self, session_id: str) -> dict[str, Any]:
        """End a session."""
        self.sessions.get(session_id)
        self.sessions.drop(session_id)
        return {"deleted": session_id}

    async def _view(self, session: Session, wanted: bool) -> dict[str, Any] | None:
        """What the page draws; None if it is not wanted, or not had in time: the step has been taken all the same."""
        if not wanted:
            return None
        try:
            return await self._plan(session.episode.copy().view)
        except Busy:
            return None

    async def _plan(self, function: Callable[..., T], *args: Any) -> T:
        return await _bounded(self._planner, PLANNER_SECONDS, function, *args)


async def _bounded(pool: ThreadPoolExecutor, seconds: float, function: Callable[..., T], *args: Any) -> T:
    """What a function gives in another thread, if it does so in time."""
    try:
        return await asyncio.wait_for(asyncio.get_running_loop().run_in_executor(pool, function, *args), seconds)
    except TimeoutError:
        raise Busy(503, f"busy: expected an answer within {seconds:g} s, found none; try later") from None
