"""A recorded episode, replayed: as a table, or as one self-contained page to step through.

A replay is a JSON file: {"format": "scheduler-replay-1", "graph": {...}, "rules": "documented", "actions": ["...", …],
"made_by": "planner"}. The environment draws nothing at random, so the texts are the whole episode.

python -m env.scheduler.replay episode.json --text
python -m env.scheduler.replay episode.json --html episode.html
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from env.scheduler.graph import Graph, GraphError
from env.scheduler.rules import RULES
from env.scheduler.scheduler import SchedulerEnv
from env.scheduler.view import view, worth

FORMAT = "scheduler-replay-1"
DONE, BAD_INPUT = 0, 2

_MODULES = ("dom", "layout", "graph", "panels", "decision", "episodes", "setup", "page")
"""The page's modules, each after those that it imports."""


class ReplayError(ValueError):
    """A replay cannot be used; the message names the file or key, what was expected and what was found."""


@dataclass(frozen=True)
class Replay:
    """An episode as texts.

    Attributes:
        graph: what is scheduled.
        rules: "documented" or "upstream".
        actions: the agent's texts in order, invalid ones included.
        made_by: whose they are; for the reader only.
    """

    graph: Graph
    rules: str
    actions: tuple[str, ...]
    made_by: str = ""

    def to_json(self) -> dict[str, Any]:
        """The object that a replay file holds."""
        return {
            "format": FORMAT,
            "graph": self.graph.to_json(),
            "rules": self.rules,
            "actions": list(self.actions),
            "made_by": self.made_by,
        }

    @classmethod
    def from_json(cls, record: Any) -> Replay:
        """Read what `to_json` writes.

        Raises:
            ReplayError: if a key is missing or holds something else than expected.
        """
        if not isinstance(record, Mapping) or record.get("format") != FORMAT:
            found = repr(record.get("format")) if isinstance(record, Mapping) else type(record).__name__
            raise ReplayError(f"format: expected an object of the format {FORMAT!r}, found {found}")
        rules: Any = record.get("rules")
        actions, made_by = record.get("actions"), record.get("made_by") or ""
        if rules not in RULES:
            raise ReplayError(f"rules: expected one of {', '.join(RULES)}, found {rules!r}")
        if not isinstance(actions, list) or not all(isinstance(text, str) for text in actions):
            raise ReplayError(f"actions: expected a list of texts, found {_short(actions)}")
        if not isinstance(made_by, str):
            raise ReplayError(f"made_by: expected a text, found {_short(made_by)}")
        if not isinstance(record.get("graph"), Mapping):
            raise ReplayError(f"graph: expected an object, found {_short(record.get('graph'))}")
        try:
            return cls(Graph.from_json(record["graph"]), rules, tuple(actions), made_by)
        except GraphError as error:
            raise ReplayError(str(error)) from None


def read_replay(path: Path) -> Replay:
    """The replay of a file.

    Raises:
        ReplayError: if it is none; the message begins with the file's name.
        OSError: if it cannot be read.
    """
    try:
        return Replay.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (ReplayError, RecursionError, ValueError) as error:
        reason = error if isinstance(error, ReplayError) else f"expected JSON, found something else ({error})"
        raise ReplayError(f"{path}: {reason}") from None


def frames(replay: Replay) -> list[dict[str, Any]]:
    """What is seen before the first action and after each.

    Returns:
        One object a step: `command` (null in the first), `observation`, `reward`, `done`, `score` (null until done),
        `view` and `worth`, as the server gives them.

    Raises:
        ReplayError: if the graph is refused by the rules, or there are actions left when the episode has ended.
    """
    try:
        env = SchedulerEnv(replay.graph, replay.rules)
    except GraphError as error:
        raise ReplayError(str(error)) from None
    observation, _ = env.reset()
    seen = [_frame(env, None, observation, 0.0)]
    for number, text in enumerate(replay.actions):
        if env.episode.ended:
            raise ReplayError(
                f"actions: expected the {number} with which the episode ends, found {len(replay.actions)}"
            )
        observation, reward, *_ = env.step(text)
        seen.append(_frame(env, text, observation, reward))
    return seen


def table(replay: Replay) -> str:
    """The episode as lines of text: one a step, then what it comes to."""
    lines = [f"{'step':>4}  {'node':>4}  {'reward':>8}  {'cycles':>14}  {'fast memory':<16}  answer"]
    seen = frames(replay)
    for number, (before, after) in enumerate(pairwise(seen), 1):
        state = after["view"]
        held = ",".join(str(tensor["id"]) for tensor in state["fast_mem"]) or "-"
        lines.append(
            f"{number:>4}  {before['view']['current']:>4}  {after['reward']:>8.4f}  {state['latency']:>14,.1f}  "
            f"{held:<16}  {_printable(after['command'])}"
        )
        if error := json.loads(after["observation"]).get("error"):
            lines.append(f"{'':>38}{error if isinstance(error, str) else json.dumps(error)}")
    last = seen[-1]["view"]
    best = "not known" if last["optimum"] is None else f"{last['optimum']:,.1f}"
    score = "not ended" if seen[-1]["score"] is None else f"score {seen[-1]['score']:.4f}"
    lines.append(
        f"{_printable(replay.graph.id)}, {replay.rules} rules, made by {_printable(replay.made_by) or 'unknown'}: "
        f"{last['latency']:,.1f} cycles, greedy {last['greedy']:,.1f}, optimum {best}, {score}"
    )
    return "\n".join(lines) + "\n"


def page(replay: Replay) -> str:
    """One HTML file that plays the replay and needs nothing else: the page's own script and style, and every frame."""
    static = files("env.server").joinpath("static")
    script = "\n".join(_unbundled(static.joinpath(f"{name}.js").read_text(encoding="utf-8")) for name in _MODULES)
    style = static.joinpath("page.css").read_text(encoding="utf-8")
    if "</" in style or "</script" in script.lower():
        raise AssertionError("the page's script or style holds an end tag and cannot be put into a page")
    data = json.dumps({"replay": replay.to_json(), "frames": frames(replay)}, separators=(",", ":"))
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {
        r'<meta http-equiv="Content-Security-Policy"[^>]*>': (
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        ),
        r'<link rel="icon"[^>]*>': '<link rel="icon" href="data:,">',
        r'<link rel="stylesheet"[^>]*>': f"<style>{style}</style>",
        r'<script type="module"[^>]*></script>': (
            f'<script type="application/json" id="recording">{_in_script(data)}</script>\n'
            f'<script type="module">{script}</script>'
        ),
    }
    html = static.joinpath("index.html").read_text(encoding="utf-8")
    for pattern, part in parts.items():
        html, count = re.subn(pattern, lambda _, part=part: part, html)  # type: ignore[misc]
        if count != 1:
            raise AssertionError(f"index.html: expected {pattern} once, found it {count} times")
    return html


def _frame(env: SchedulerEnv, command: str | None, observation: str, reward: float) -> dict[str, Any]:
    ended = env.episode.ended
    return {
        "command": command,
        "observation": observation,
        "reward": reward,
        "done": ended,
        "score": env.score if ended else None,
        "view": view(env),
        "worth": worth(env),
    }


def _unbundled(module: str) -> str:
    """A module's text without its imports and exports, to stand in one script with the others."""
    module = re.sub(r"^import [^;]*;\n", "", module, flags=re.MULTILINE)
    return re.sub(r"^export (?=(?:async )?(?:function|class|const)\b)", "", module, flags=re.MULTILINE)


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _in_script(data: str) -> str:
    """JSON that no HTML parser mistakes for the end of its script element."""
    return data.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e")


def _printable(text: str) -> str:
    """A text of a file on one line of a terminal, without what a terminal would obey."""
    line = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in " ".join(text.split()))
    return line if len(line) <= 100 else line[:99] + "…"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:59] + "…"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"error: {message} (--help lists the options)\n")
        sys.exit(BAD_INPUT)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status: 0 done, 2 bad input."""
    parser = _Parser(
        prog="python -m env.scheduler.replay", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="replay file")
    parser.add_argument("--html", type=Path, metavar="OUT", help="write a self-contained page there")
    parser.add_argument("--text", action="store_true", help="print a table (the default without --html)")
    options = parser.parse_args(argv)
    try:
        replay = read_replay(options.file)
        if options.text or options.html is None:
            sys.stdout.write(table(replay))
        if options.html is not None:
            options.html.parent.mkdir(parents=True, exist_ok=True)
            options.html.write_text(page(replay), encoding="utf-8")
    except (ReplayError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return BAD_INPUT
    return DONE


if __name__ == "__main__":
    sys.exit(main())
