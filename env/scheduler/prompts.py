"""Observations as chat messages."""

from __future__ import annotations

SYSTEM_PROMPT = (
    "You schedule tensor operations on a machine with a small fast memory. Answer for the current node with one JSON "
    'object: {"fuse_with_prev": true or false, "tile": 32, 64, 128 or 256, "retain": [ids to keep in fast memory]}. '
    "future_uses counts the reads of each tensor that are still to come."
)


def messages(observation: str, system: str = SYSTEM_PROMPT) -> tuple[dict[str, str], dict[str, str]]:
    """The chat that asks for the current node's action."""
    return {"role": "system", "content": system}, {"role": "user", "content": observation}
