"""Prompts that differ in one fact, and ordinary ones with what an optimal agent thinks. Knows no model."""

from counterfactuals.decision import Decision, read_decisions, write_decisions
from counterfactuals.episodes import Episode, Outcome, play_together, scheduler_episodes
from counterfactuals.pair import CounterfactualPair, PairError, read_pairs, write_pairs
from counterfactuals.scheduler import generate_pairs
from counterfactuals.scheduler_decisions import generate_decisions

__all__ = [
    "CounterfactualPair",
    "Decision",
    "Episode",
    "Outcome",
    "PairError",
    "generate_decisions",
    "generate_pairs",
    "play_together",
    "read_decisions",
    "read_pairs",
    "scheduler_episodes",
    "write_decisions",
    "write_pairs",
]
