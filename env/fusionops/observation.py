"""What the agent sees: prose in named sections, in a fixed order, one fact in one place.

Whether a tensor is in fast memory is said by one word, `fast` or `slow`, in the section Memory. No number is derived
from it (free capacity is left to the reader); only the hints depend on it too, since what does not fit is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from env.fusionops.episode import Episode, Outcome
from env.fusionops.graph import Graph
from env.fusionops.hints import hints
from env.fusionops.rules import Refusal, ready

SECTIONS = (
    "Last result", "State", "Memory", "Graph", "Hints", "Constraints", "Advice", "Progress", "Format",
)  # fmt: skip
CONSTRAINTS = (
    "list ops that have run, are ready, or wait only for other listed ops; several ops must be linked, one reading "
    "what another makes; retain only what a listed op makes, it stays for one step. Each tensor in fast memory takes "
    "all of its elements, each loaded input and each output that is not read here w*h (a MatMul's first input k*h, or "
    "all where k splits the reduction, its second w*k); their sum must be within the capacity."
)
ADVICE = (
    "what a listed op makes and another listed op reads is never moved; retain what the next step reads; every tile "
    "pays the whole cost of its ops, so prefer large tiles that fit."
)
FORMAT = "SCHEDULE ops=[ids] config=[w,h,k] retain=[ids], optionally traversal=[tile indices in order]"
ADVICE_BY_CLASS: Mapping[str, str] = MappingProxyType(
    {
        "memory": "Take a smaller w, h or k, or fewer ops.",
        "dependency": "Run that op first, or list it too.",
        "retention": "Retain only what the listed ops make.",
        "connectivity": "List ops that hang together by what they make and read.",
        "already_scheduled": "List each op once.",
        "parse": "Write one line as said under Format.",
        "invalid": "Take ids from Graph, positive sizes, and each tile once.",
    }
)
_REASONS: Mapping[str, str] = MappingProxyType(
    {
        "unknown_op": "there is no op {op}",
        "duplicate_op": "an op is listed twice",
        "dependency": "op {op} reads tensor {tensor}, which op {producer} has not made",
        "not_connected": "the listed ops are not linked",
        "config_not_positive": "w, h and k must be above 0",
        "retain_not_produced": "no listed op makes tensor {tensor}",
        "oom": "it needs {working_set} elements of {capacity}",
        "traversal_length": "the traversal has {given} tiles of {expected}",
        "traversal_not_permutation": "the traversal does not name each tile once",
        "unreadable": "the text names no ops, or not as whole numbers",
    }
)
LONGEST_NUMBER = 20

_TITLE = re.compile(rf"^({'|'.join(SECTIONS)}): ", re.MULTILINE)
_RESIDENCY = re.compile(r"\b(\d+) (fast|slow)\b")


def observe(episode: Episode, max_steps: int, naive_latency: float, score: float) -> str:
    """The observation of a state.

    Args:
        max_steps: of the episode.
        naive_latency: time.
        score: of the state.
    """
    graph = episode.graph
    proposed = "; ".join(action.to_text() for action in hints(graph, episode.scheduled, episode.fast))
    texts = (
        _last_result(episode.last),
        f"step {episode.step_count} of {max_steps}, latency {episode.latency:.1f}, naive {naive_latency:.1f}",
        _memory(episode),
        _graph(graph),
        proposed,
        CONSTRAINTS,
        ADVICE,
        _progress(episode, score),
        FORMAT,
    )
    return "\n".join(f"{title}: {text}" for title, text in zip(SECTIONS, texts, strict=True))


def sections(text: str) -> dict[str, str]:
    """The sections of an observation by title, in order."""
    _, *parts = _TITLE.split(text)
    return {title: body.rstrip("\n") for title, body in zip(parts[::2], parts[1::2], strict=True)}


def section_span(text: str, title: str) -> tuple[int, int]:
    """Characters of a section's text.

    Raises:
        ValueError: if there is no such section.
    """
    start = text.index(f"{title}: ") if text.startswith(f"{title}: ") else text.index(f"\n{title}: ") + 1
    start += len(title) + 2
    return start, start + len(sections(text)[title])


def residency_spans(text: str) -> dict[int, tuple[int, int]]:
    """By tensor, the characters of the word that says whether it is in fast memory."""
    start, end = section_span(text, "Memory")
    return {int(found[1]): found.span(2) for found in _RESIDENCY.finditer(text, start, end)}


def _last_result(last: Outcome | None) -> str:
    if last is None:
        return "none yet"
    if last.refusal:
        error = last.refusal.error_class
        return f"refused ({error}): {_reason(last.refusal)}. {ADVICE_BY_CLASS[error]}"
    assert last.action is not None
    assert last.cost is not None
    sizes = ",".join(map(_shown, last.action.config))
    return (
        f"ran ops [{_listed(last.action.ops)}] with config [{sizes}], latency {last.cost.latency:.1f}, "
        f"working set {last.cost.working_set}"
    )


def _reason(refused: Refusal) -> str:
    return _REASONS[refused.kind].format_map({key: _shown(value) for key, value in refused.details.items()})


def _memory(episode: Episode) -> str:
    """The capacity, and where each tensor is that exists: graph inputs and what ops that have run made."""
    graph = episode.graph
    made = (t for op in episode.scheduled for t in graph.ops[op].outputs)
    places = ", ".join(f"{t} {'fast' if t in episode.fast else 'slow'}" for t in sorted({*graph.graph_inputs, *made}))
    return f"capacity {graph.hardware.fast_memory_capacity}; {places}"


def _graph(graph: Graph) -> str:
    width, height = graph.hardware.native_granularity
    by_size: dict[str, list[int]] = {}
    for tensor in graph.tensors:
        by_size.setdefault(f"{tensor.width}x{tensor.height}", []).append(tensor.id)
    tensors = "; ".join(f"{size} {_listed(ids)}" for size, ids in by_size.items())
    lines = [
        f"{len(graph)} ops, native tile {width}x{height}, bandwidth {graph.hardware.slow_memory_bandwidth:.10g}",
        f"tensors {tensors}",
    ]
    lines += [
        f"op {op.id} {op.type} reads {_listed(op.inputs)} makes {_listed(op.outputs)} cost {op.base_cost:.10g}"
        for op in graph.ops
    ]
    return "\n".join(lines)


def _progress(episode: Episode, score: float) -> str:
    done, runnable = sorted(episode.scheduled), ready(episode.graph, episode.scheduled)
    return (
        f"{len(done)} of {len(episode.graph)} ops done: {_listed(done) or 'none'}; "
        f"ready: {_listed(runnable) or 'none'}; score {score:.4f}"
    )


def _listed(ids: Iterable[int]) -> str:
    return ",".join(map(_shown, ids))


def _shown(number: int) -> str:
    """A number that an agent wrote may be of any length."""
    text = str(number)
    return text if len(text) <= LONGEST_NUMBER else text[: LONGEST_NUMBER - 3] + "..."
