"""The small version of the load test: no session is lost or crossed, and clients that die leave nothing behind."""

import asyncio

import pytest

from tests.server.load import LEFT_IN_THE_MIDDLE, run
from tests.server.serving import serving


@pytest.mark.slow
def test_eight_clients() -> None:
    with serving() as (base, pid):
        report = asyncio.run(run(base, pid, clients=8, episodes=40, graphs=6))
    assert report.episodes + report.left == 40
    assert report.left == 40 // LEFT_IN_THE_MIDDLE
    assert report.sessions == 0
