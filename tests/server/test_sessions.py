"""How many sessions there are, how long they live, and whom they belong to."""

import asyncio
import time

import pytest

from env.server.catalogue import start_episode
from env.server.errors import ServiceError
from env.server.requests import ResetRequest
from env.server.service import Service
from env.server.sessions import MOST_STEPS, Session, Sessions


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def new_session(**body: object) -> Session:
    return Session(*start_episode(ResetRequest.model_validate(body)))


def finished() -> Session:
    session = new_session()
    while not session.done:
        session.step("no action")
    return session


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sessions(clock: Clock) -> Sessions:
    return Sessions(idle_seconds=600, most=3, clock=clock)


def test_a_session_ends_after_idleness_and_a_use_counts(sessions: Sessions, clock: Clock) -> None:
    session = new_session()
    sessions.add(session)
    for _ in range(3):
        clock.now += 600
        assert sessions.get(session.id) is session
    clock.now += 600.5
    with pytest.raises(ServiceError, match="expected the id of a live one, found none") as refusal:
        sessions.get(session.id)
    assert refusal.value.status == 404
    assert len(sessions) == 0


def test_idleness_counts_from_the_end_of_a_use(sessions: Sessions, clock: Clock) -> None:
    session = new_session()
    sessions.add(session)

    async def slow_use() -> None:
        async with sessions.using(session.id):
            clock.now += 900
            sessions.sweep()  # a session in use does not expire
        clock.now += 600
        assert sessions.get(session.id) is session

    asyncio.run(slow_use())


def test_a_sweep_ends_the_idle_only(sessions: Sessions, clock: Clock) -> None:
    old, young = new_session(), new_session()
    sessions.add(old)
    clock.now += 400
    sessions.add(young)
    clock.now += 400
    sessions.sweep()
    assert sessions.get(young.id) is young
    assert len(sessions) == 1


def test_a_full_house_refuses_rather_than_ends_an_episode_in_play(sessions: Sessions, clock: Clock) -> None:
    playing = [new_session() for _ in range(3)]
    for session in playing:
        sessions.add(session)
    with pytest.raises(ServiceError, match="expected fewer than 3 in play") as refusal:
        sessions.add(new_session())
    assert refusal.value.status == 503
    clock.now += 601
    sessions.add(new_session())  # the idle ones made room
    assert len(sessions) == 1


def test_an_ended_episode_makes_room_the_longest_idle_first(sessions: Sessions, clock: Clock) -> None:
    first, second, playing = finished(), finished(), new_session()
    for session in (first, second, playing):
        sessions.add(session)
        clock.now += 1
    sessions.get(first.id)
    sessions.add(new_session())
    assert sessions.get(first.id) is first
    assert sessions.get(playing.id) is playing
    with pytest.raises(ServiceError):
        sessions.get(second.id)


def test_ids_do_not_repeat_and_are_long() -> None:
    ids = {Session.__dataclass_fields__["id"].default_factory() for _ in range(1000)}  # type: ignore[misc]
    assert len(ids) == 1000
    assert min(map(len, ids)) >= 32


def test_an_episode_takes_a_bounded_number_of_texts() -> None:
    session = new_session(environment="fusionops")
    for _ in range(MOST_STEPS):
        session.step("no action")  # costs no step there
    with pytest.raises(ServiceError, match=f"at most {MOST_STEPS}"):
        session.step("no action")


def test_whose_texts_they_are() -> None:
    session = new_session()
    text = session.episode.suggest("greedy", session.observation)
    session.suggestion = ("greedy", text)
    session.step(text)
    assert session.made_by == "greedy"
    session.step(text)
    assert session.made_by == "greedy, by hand"


def test_what_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("env.server.service.PLAYER_SECONDS", 0.05)

    async def ask() -> None:
        service = Service(lambda environment, observation: str(time.sleep(0.5)))
        session_id = (await service.reset(ResetRequest(view=False)))["session_id"]
        with pytest.raises(ServiceError, match=r"expected an answer within 0.05 s") as refusal:
            await service.suggest(session_id, "adapter")
        assert refusal.value.status == 503
        answer = await service.step(session_id, "no action", view=False)  # the session goes on
        assert answer["reward"] == -0.1
        service.close()

    asyncio.run(ask())


def test_a_step_is_taken_even_if_there_is_no_time_to_draw_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("env.server.service.PLANNER_SECONDS", 0.05)
    monkeypatch.setattr("env.server.episodes.view", lambda env: time.sleep(0.5))

    async def ask() -> None:
        service = Service()
        session_id = (await service.reset(ResetRequest(view=False)))["session_id"]
        answer = await service.step(session_id, "no action")
        assert (answer["reward"], answer["view"]) == (-0.1, None)
        assert (await service.state(session_id, view=False))["actions"] == ["no action"]
        service.close()

    asyncio.run(ask())
