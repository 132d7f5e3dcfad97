"""Which environments there are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from env.server.episodes import Episode, SchedulerEpisode
from env.server.fusionops_episode import FusionOpsEpisode
from env.server.requests import ResetRequest

ENVIRONMENTS: Mapping[str, type[Episode]] = {episode.name: episode for episode in (SchedulerEpisode, FusionOpsEpisode)}


def catalogue() -> dict[str, dict[str, Any]]:
    """What can be asked for, by environment."""
    return {name: environment.catalogue() for name, environment in ENVIRONMENTS.items()}


def start_episode(request: ResetRequest) -> tuple[Episode, str]:
    """A new episode and its first observation.

    Raises:
        ServiceError: if what is asked for does not exist or breaks a rule.
    """
    episode = ENVIRONMENTS[request.environment](request)
    return episode, episode.start()
