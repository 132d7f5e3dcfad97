"""Environments that teach a language model to act, and the training of agents in them. Knows no analysis."""
