"""Observations as chat messages."""

from __future__ import annotations

SYSTEM_PROMPT = (
    "You schedule tensor operations on a machine with a small fast memory. Answer with one line: "
    "SCHEDULE ops=[ids] config=[w,h,k] retain=[ids]. The ops run as one kernel in tiles of w by h, with k steps of a "
    "matmul's inner dimension at a time; what is retained stays in fast memory for the next step."
)


def messages(observation: str, system: str = SYSTEM_PROMPT) -> tuple[dict[str, str], dict[str, str]]:
    """The chat that asks for the next action."""
    return {"role": "system", "content": system}, {"role": "user", "content": observation}
