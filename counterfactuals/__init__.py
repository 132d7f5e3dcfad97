"""Pairs of prompts that differ in one fact. Knows environments, knows no model."""

from counterfactuals.pair import CounterfactualPair, PairError, read_pairs, write_pairs
from counterfactuals.scheduler import generate_pairs

__all__ = ["CounterfactualPair", "PairError", "generate_pairs", "read_pairs", "write_pairs"]
