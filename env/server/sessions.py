"""The episodes in play: unguessable ids, an end after idleness, a bound on how many there are."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from env.server.episodes import Episode
from env.server.errors import ServiceError

BY_HAND = "by hand"
MOST_STEPS = 1000
"""Texts of one episode: in fusionops a text that cannot be read ends nothing."""


@dataclass(eq=False)
class Session:
    """One client's episode.

    Attributes:
        episode: the episode itself.
        observation: what the agent saw last.
        episode_id: the client's own name for it.
        id: what the client names it by.
        actions: the texts so far.
        done: no further step is taken.
        lock: held while a request of this session is answered, so that they are answered one after the other.
        used: when it was last used, seconds of the store's clock.
        suggestion: the policy and the text that were last suggested.
        authors: whose texts `actions` are, in order of appearance.
    """

    episode: Episode
    observation: str
    episode_id: str | None = None
    id: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    actions: list[str] = field(default_factory=list)
    done: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    used: float = 0.0
    suggestion: tuple[str, str] = ("", "")
    authors: list[str] = field(default_factory=list)

    def step(self, command: str) -> dict[str, Any]:
        """Take a step; returns `observation`, `reward`, `done`, `info` and `score` (None until done).

        Raises:
            ServiceError: 409, if the episode has ended or has taken `MOST_STEPS` texts.
        """
        if self.done:
            raise ServiceError(409, f"step: expected an episode in play, found its end after {len(self.actions)} steps")
        if len(self.actions) >= MOST_STEPS:
            raise ServiceError(409, f"step: expected at most {MOST_STEPS} in one episode, found one more")
        self.observation, reward, self.done, info = self.episode.step(command)
        self.actions.append(command)
        policy, suggested = self.suggestion
        author = policy if policy and suggested == command else BY_HAND
        if author not in self.authors:
            self.authors.append(author)
        self.suggestion = ("", "")
        score = self.episode.score if self.done else None
        return {"observation": self.observation, "reward": reward, "done": self.done, "info": info, "score": score}

    @property
    def made_by(self) -> str:
        """Whose texts the actions are."""
        return ", ".join(self.authors)


class Sessions:
    """The sessions, by id.

    A session ends when it was not used for `idle_seconds`. When there are `most` and another is asked for, the ended
    episode that was idle longest makes room; if all are in play, the new one is refused: nobody loses an episode to
    somebody else.

    Args:
        idle_seconds: after which a session ends.
        most: how many there may be.
        clock: seconds, from anywhere.
    """

    def __init__(self, *, idle_seconds: float, most: int, clock: Callable[[], float]) -> None:
        self.idle_seconds = idle_seconds
        self.most = most
        self._clock = clock
        self._by_id: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, session: Session) -> None:
        """Take a session in.

        Raises:
            ServiceError: 503, if there are as many as there may be and all are in play.
        """
        if len(self._by_id) >= self.most:
            self.sweep()
        if len(self._by_id) >= self.most:
            ended = [other for other in self._by_id.values() if other.done and not other.lock.locked()]
            if not ended:
                raise ServiceError(503, f"sessions: expected fewer than {self.most} in play, found that many")
            self.drop(min(ended, key=lambda other: other.used).id)
        session.used = self._clock()
        self._by_id[session.id] = session

    def get(self, session_id: str) -> Session:
        """The session of an id, which counts as a use.

        Raises:
            ServiceError: 404, if there is none, or it was idle for too long.
        """
        session = self._by_id.get(session_id)
        if session is None or self._expired(session):
            self._by_id.pop(session_id, None)
            raise ServiceError(
                404,
                f"session: expected the id of a live one, found none; one ends after {self.idle_seconds:g} s unused",
            )
        session.used = self._clock()
        return session

    @asynccontextmanager
    async def using(self, session_id: str) -> AsyncIterator[Session]:
        """The session of an id, locked; idleness counts from the end of the use.

        Raises:
            ServiceError: as `get`.
        """
        session = self.get(session_id)
        async with session.lock:
            yield session
        session.used = self._clock()

    def drop(self, session_id: str) -> bool:
        """End a session; whether there was one."""
        return self._by_id.pop(session_id, None) is not None

    def sweep(self) -> None:
        """End the sessions that were idle for too long."""
        for session in [session for session in self._by_id.values() if self._expired(session)]:
            self.drop(session.id)

    def _expired(self, session: Session) -> bool:
        return not session.lock.locked() and self._clock() - session.used > self.idle_seconds
