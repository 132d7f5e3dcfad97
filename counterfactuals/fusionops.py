"""Pairs of fusion observations that the environment itself proves to differ in one tensor's place only.

One graph is played twice. The texts are the same but for the last one, which retains tensor t in one and nothing in the
other; its kernel is compute-bound, so that writing t costs no time. The two states are compared, and the observations
section by section, and refused unless t's word in Memory, `fast` or `slow`, is all that differs.

What is asked is the tile of an op that is ready: `SCHEDULE ops=[5] config=[` and so on. A tensor in fast memory takes
all of its elements, read or not, and one that is loaded a tile only: with t in fast memory there is less room. Every
square tile is tried on a clone; what a state calls for is the fastest that fits. (Whichever runs, the state after it
differs in latency only, so the fastest is best for the whole episode.) A pair is made where the one that the slow state
calls for is refused in the fast state, which calls for another. At random, half of the pairs have the fast state as A,
and in half the op reads t.

    python -m counterfactuals.fusionops --count 64 --out pairs.jsonl

Kinds:
    residency: the main kind, as above.
    roomy: the same with so much memory that both states call for the same tile; the decision should not move.
    identical: A is B; nothing may move at all.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.random import Generator
from tqdm import tqdm

from counterfactuals.pair import CounterfactualPair, PairError, read_pairs, write_pairs
from env.fusionops import Action, FusionOpsEnv, Graph, parse_action
from env.fusionops.graph import MATMUL
from env.fusionops.observation import residency_spans, section_span, sections
from env.fusionops.prompts import SYSTEM_PROMPT, messages
from env.fusionops.rules import ready
from env.fusionops.topologies import generate_graph

KINDS = ("residency", "roomy", "identical")
TILES = (32, 64, 128, 256, 512)
SIDES = (256, 512)
OPS = (5, 9)
BANDWIDTHS = (20.0, 50.0, 100.0)
CAPACITIES = (1.2, 4.0)
COSTS = (500, 4000)
ATTEMPTS = 5000
SHOWN_SECTIONS = ("State", "Memory", "Graph", "Hints", "Constraints", "Progress")


class PairRefused(PairError):
    """The environment does not prove that two observations differ in one tensor's place only."""


@dataclass(frozen=True)
class Moment:
    """Two states of a graph that differ in whether one tensor is in fast memory.

    Attributes:
        actions: texts played in both; the last one retains nothing, and `tensor` in the fast state.
        tensor: what the last kernel makes.
        op: whose tile is asked for.
    """

    graph: Graph
    actions: tuple[str, ...]
    tensor: int
    op: int

    def states(self) -> tuple[FusionOpsEnv, FusionOpsEnv]:
        """The fast and the slow state, by replay.

        Raises:
            PairRefused: unless the tensor's place is their only difference, and the op is ready in both.
        """
        *before, last = self.actions
        retaining = replace(parse_action(last), retain=(self.tensor,)).to_text()
        fast, slow = replay(self.graph, (*before, retaining)), replay(self.graph, self.actions)
        a, b = fast.episode, slow.episode
        if (a.fast, b.fast) != ({self.tensor}, frozenset()):
            raise PairRefused(f"expected {self.tensor} and nothing in fast memory, found {set(a.fast)}, {set(b.fast)}")
        if (a.scheduled, a.latency, a.step_count, a.ended) != (b.scheduled, b.latency, b.step_count, b.ended):
            raise PairRefused("expected states that differ in fast memory only, found another latency or progress")
        texts = sections(fast.observation()), sections(slow.observation())
        differing = [title for title in texts[0] if texts[0][title] != texts[1][title]]
        if differing != ["Memory"]:
            raise PairRefused(f"expected observations that differ in Memory only, found {', '.join(differing)}")
        start, end = residency_spans(slow.observation())[self.tensor]
        whole = slow.observation()
        if whole[:start] + "fast" + whole[end:] != fast.observation():
            raise PairRefused(f"expected Memory to differ in tensor {self.tensor} only, found more")
        if self.op not in ready(self.graph, b.scheduled):
            raise PairRefused(f"expected op {self.op} to be ready, found that it is not")
        return fast, slow

    def action(self, tile: int) -> Action:
        """The op alone in square tiles, a matmul with its whole inner dimension, retaining nothing."""
        op = self.graph.ops[self.op]
        depth = self.graph.tensors[op.inputs[0]].width if op.type == MATMUL else 1
        return Action((self.op,), (tile, tile, depth))

    def latency(self, state: FusionOpsEnv, tile: int) -> float | None:
        """Time of the op in square tiles, tried on a clone; None if it does not fit."""
        *_, info = state.clone().act(self.action(tile))
        return None if info["error"] else info["latency"]

    def called_for(self, state: FusionOpsEnv) -> int:
        """The fastest square tile that fits.

        Raises:
            PairRefused: if none fits, or two are equally fast.
        """
        found = {tile: latency for tile in TILES if (latency := self.latency(state, tile)) is not None}
        best = [tile for tile, latency in found.items() if latency == min(found.values())]
        if len(best) != 1:
            raise PairRefused(f"expected one fastest tile of op {self.op}, found {best}")
        return best[0]

    def roomy(self) -> Moment:
        """The same on a machine on which everything fits."""
        capacity = sum(t.size for t in self.graph.tensors) + 4 * max(TILES) ** 2
        hardware = replace(self.graph.hardware, fast_memory_capacity=capacity)
        return replace(self, graph=replace(self.graph, hardware=hardware))


def replay(graph: Graph, actions: Sequence[str]) -> FusionOpsEnv:
    """The environment after some action texts.

    Raises:
        PairRefused: if one of them is refused.
    """
    env = FusionOpsEnv(graph)
    env.reset()
    for number, text in enumerate(actions):
        *_, info = env.step(text)
        if info["error"]:
            raise PairRefused(f"expected actions that run, found action {number} refused ({info['error']['kind']})")
    return env


def generate_pairs(
    count: int, seed: int, *, kind: str = "residency", system: str = SYSTEM_PROMPT
) -> list[CounterfactualPair]:
    """Pairs of one kind, each from a graph of its own.

    Args:
        count: how many pairs.
        seed: names the pairs for ever; a larger count with the same seed begins with the same pairs.
        kind: one of `KINDS`.
        system: the system prompt that the agent was trained with.

    Raises:
        PairError: if an argument is not as said.
    """
    if kind not in KINDS:
        raise PairError(f"kind: expected one of {', '.join(KINDS)}, found {kind!r}")
    pairs = []
    for draw in range(count):
        rng = np.random.default_rng([seed, KINDS.index(kind), draw])
        moment, tiles = _search(rng, require_roomy=kind == "roomy")
        a_is_fast = bool(rng.random() < 0.5)
        shown = moment.roomy() if kind == "roomy" else moment
        pairs.append(_pair(f"fusionops-{kind}-{seed}-{draw}", kind, shown, tiles, a_is_fast, system))
    return pairs


def prove(pair: CounterfactualPair) -> None:
    """Replay what a pair was made of and compare.

    Raises:
        PairRefused: if the environment does not give this pair again.
    """
    meta = pair.meta
    if pair.kind not in KINDS:
        raise PairRefused(f"pair {pair.id}: kind: expected one of {', '.join(KINDS)}, found {pair.kind!r}")
    try:
        moment = Moment(Graph.from_json(meta["graph"]), tuple(meta["actions"]), meta["tensor"], meta["op"])
        tiles = meta["tiles"]["fast"], meta["tiles"]["slow"]
        again = _pair(pair.id, pair.kind, moment, tiles, meta["a_is_fast"], pair.messages_a[0]["content"])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise PairRefused(f"pair {pair.id}: cannot be made again: {error}") from None
    if again.to_json() != pair.to_json():
        raise PairRefused(f"pair {pair.id}: expected what its graph and actions give, found another text")


def _search(rng: Generator, *, require_roomy: bool) -> tuple[Moment, tuple[int, int]]:
    """A random moment, and the tiles that its fast and its slow state call for."""
    reads_tensor = bool(rng.random() < 0.5)
    for _ in range(ATTEMPTS):
        try:
            moment = _draw(rng, reads_tensor)
            fast, slow = moment.states()
            tiles = moment.called_for(fast), moment.called_for(slow)
            if moment.latency(fast, tiles[1]) is not None:
                continue
            if require_roomy:
                _same_tile(moment.roomy())
        except PairRefused:
            continue
        return moment, tiles
    raise PairRefused(f"expected a moment whose tile depends on fast memory, found none in {ATTEMPTS} random graphs")


def _same_tile(moment: Moment) -> int:
    fast, slow = map(moment.called_for, moment.states())
    if fast != slow:
        raise PairRefused(f"expected one tile of both states, found {fast} and {slow}")
    return fast


def _draw(rng: Generator, reads_tensor: bool) -> Moment:
    """A random graph played op by op for some steps, and an op that is ready then."""
    graph = generate_graph(
        int(rng.integers(OPS[0], OPS[1] + 1)),
        int(rng.choice(SIDES)),
        rng=rng,
        capacity=round(float(rng.uniform(*CAPACITIES)), 2),
        bandwidth=float(rng.choice(BANDWIDTHS)),
        cost=COSTS,
        name="fusionops",
    )
    actions: list[str] = []
    scheduled: set[int] = set()
    op = 0
    for _ in range(int(rng.integers(1, len(graph) - 1))):
        op = int(rng.choice(ready(graph, scheduled)))
        scheduled.add(op)
        actions.append(Moment(graph, (), 0, op).action(int(rng.choice(TILES[1:3]))).to_text())
    (tensor,) = graph.ops[op].outputs
    candidates = [i for i in ready(graph, scheduled) if (i in graph.consumers[tensor]) == reads_tensor]
    if not candidates:
        raise PairRefused(f"expected a ready op that {'reads' if reads_tensor else 'leaves'} {tensor}, found none")
    return Moment(graph, tuple(actions), tensor, int(rng.choice(candidates)))


def _pair(
    name: str, kind: str, moment: Moment, tiles: tuple[int, int], a_is_fast: bool, system: str
) -> CounterfactualPair:
    """The pair that a moment proves; `tiles` are those of its fast and slow state where memory is scarce."""
    fast, slow = states = moment.states()
    if kind == "roomy":
        called_for = [_same_tile(moment)] * 2
    else:
        called_for = [moment.called_for(state) for state in states]
        if tuple(called_for) != tiles or moment.latency(fast, tiles[1]) is not None:
            raise PairRefused(f"expected the tiles {tiles}, the second refused in the fast state, found {called_for}")
    a, b = (fast, slow) if a_is_fast else (slow, fast)
    text_a, text_b = a.observation(), (a if kind == "identical" else b).observation()
    texts = [moment.action(tile).to_text().partition("config=[") for tile in (tiles if a_is_fast else tiles[::-1])]
    return CounterfactualPair(
        id=name,
        environment="fusionops",
        kind=kind,
        messages_a=messages(text_a, system),
        messages_b=messages(text_b, system),
        action_prefix="".join(texts[0][:2]),
        answer=texts[0][2],
        foil=texts[1][2],
        spans=_spans(text_a, moment),
        group=moment.graph.fingerprint[:16],
        meta={
            "tensor": moment.tensor,
            "op": moment.op,
            "reads_tensor": moment.tensor in moment.graph.ops[moment.op].inputs,
            "a_is_fast": a_is_fast,
            "tiles": {"fast": tiles[0], "slow": tiles[1]},
            "called_for": {"fast": called_for[0], "slow": called_for[1]},
            "actions": list(moment.actions),
            "graph": moment.graph.to_json(),
        },
    )


def _spans(text: str, moment: Moment) -> dict[str, tuple[int, int]]:
    """Characters of an observation: the tensor's place and id, another tensor's, the op's line, and whole sections."""
    places = residency_spans(text)
    other = next(t for t in places if t != moment.tensor)

    def id_of(tensor: int) -> tuple[int, int]:
        end = places[tensor][0] - 1
        return end - len(str(tensor)), end

    line = f"op {moment.op} "
    start = text.index(line, section_span(text, "Graph")[0])
    spans = {title.lower(): section_span(text, title) for title in SHOWN_SECTIONS}
    spans["op"] = start, text.index("\n", start)
    spans |= {"value": places[moment.tensor], "key": id_of(moment.tensor)}
    return spans | {"other_value": places[other], "other_key": id_of(other)}


def main(argv: Sequence[str] | None = None) -> int:
    """Write a pair file, or prove one; returns 0, or 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m counterfactuals.fusionops",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--count", type=int, default=64, help="pairs of each kind (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="names the pairs (%(default)s)")
    parser.add_argument("--kind", action="append", choices=KINDS, help="may be repeated (default: residency)")
    parser.add_argument("--system", type=Path, help="file with the system prompt (default: the project's own)")
    parser.add_argument("--out", type=Path, help="pair file to write")
    parser.add_argument("--prove", type=Path, metavar="FILE", help="replay the pairs of a file instead, and compare")
    parser.add_argument("--quiet", action="store_true", help="no progress bar, no summary")
    options = parser.parse_args(argv)
    if (options.out is None) == (options.prove is None):
        parser.error("expected --out FILE or --prove FILE")
    if options.count < 1:
        parser.error(f"--count: expected 1 or more, found {options.count}")
    try:
        said = _prove_file(options) if options.prove else _write_file(options)
    except (PairError, OSError, UnicodeDecodeError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    if not options.quiet:
        sys.stdout.write(said + "\n")
    return 0


def _write_file(options: argparse.Namespace) -> str:
    system = options.system.read_text(encoding="utf-8") if options.system else SYSTEM_PROMPT
    kinds = options.kind or ["residency"]
    bar = tqdm(kinds, "kinds", disable=options.quiet)
    pairs = [pair for kind in bar for pair in generate_pairs(options.count, options.seed, kind=kind, system=system)]
    write_pairs(pairs, options.out)
    return f"{options.out}: {options.count} of each of {', '.join(kinds)}; {len({p.group for p in pairs})} graphs"


def _prove_file(options: argparse.Namespace) -> str:
    pairs = read_pairs(options.prove)
    for pair in tqdm(pairs, "pairs replayed", disable=options.quiet):
        prove(pair)
    return f"{options.prove}: {len(pairs)} pairs, all as the environment gives them"


if __name__ == "__main__":
    sys.exit(main())
