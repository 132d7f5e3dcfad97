"""Looking for good sequences of one program: the best of random walks, a genetic search along the synergy graph, and
hill climbing, which knows no graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from numpy.random import Generator

from env.passes.catalogue import runnable
from env.passes.evaluator import Evaluator
from env.passes.programs import Program
from env.passes.synergy import LONGEST_WALK, SHORTEST_WALK, SynergyGraph

WALKS = 100

Sequences = list[tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Found:
    """A sequence, how many instructions it leaves, and how many sequences were measured to find it."""

    sequence: tuple[str, ...]
    instructions: int
    measured: int


@dataclass(frozen=True, slots=True)
class Genetics:
    """The size of a genetic search; the defaults are those of the published tool.

    Attributes:
        population: sequences in each generation.
        generations: after the first one.
        kept: best sequences that pass to the next generation as they are.
        rivals: sequences of which the best becomes a parent.
        mutation: how likely the rest of a child, from a place drawn at random, is walked anew.
    """

    population: int = 100
    generations: int = 10
    kept: int = 10
    rivals: int = 3
    mutation: float = 0.3


def best_of_walks(
    program: Program, graph: SynergyGraph, evaluator: Evaluator, rng: Generator, count: int = WALKS
) -> Found:
    """The walk of `count` that leaves the fewest instructions, and so has the highest OverOz; of equals the shortest.

    Raises:
        ValueError: if the graph has no walks, or no walk could be measured.
    """
    walks = graph.walks(count, rng)
    return _best(walks, _measure(program, evaluator, walks), len(set(walks)))


def genetic_search(
    program: Program, graph: SynergyGraph, evaluator: Evaluator, rng: Generator, genetics: Genetics | None = None
) -> Found:
    """The best sequence that a genetic search finds; every sequence in it is a walk of the graph.

    A child is the beginning of one parent and the end of another, joined where the graph has an edge between them; then
    its rest may be walked anew. The best sequences stay, so no generation is worse than the one before.

    Raises:
        ValueError: if the graph has no walks, or no sequence could be measured.
    """
    genetics = genetics or Genetics()
    population = graph.walks(genetics.population, rng)
    seen: dict[tuple[str, ...], float] = {}
    for generation in range(genetics.generations + 1):
        new = [sequence for sequence in dict.fromkeys(population) if sequence not in seen]
        seen |= zip(new, _measure(program, evaluator, new), strict=True)
        ranked = sorted(set(population), key=lambda sequence: (seen[sequence], len(sequence), sequence))
        if generation < genetics.generations:
            children = genetics.population - min(genetics.kept, len(ranked))
            population = ranked[: genetics.kept] + [_child(graph, ranked, genetics, rng) for _ in range(children)]
    return _best(list(seen), list(seen.values()), len(seen))


def hill_climb(
    program: Program, evaluator: Evaluator, rng: Generator, evaluations: int = 400, passes: Sequence[str] | None = None
) -> Found:
    """One sequence, changed in one random place at a time, each change kept if it leaves no more instructions.

    It begins with a random sequence. A change puts a pass in, takes one out, or puts one in the place of another.

    Args:
        evaluations: sequences measured, the first one included.
        passes: to choose from; None: all that LLVM 20 can run.

    Raises:
        ValueError: if no sequence could be measured.
    """
    choice = list(passes or runnable())
    length = int(rng.integers(SHORTEST_WALK, LONGEST_WALK + 1))
    best = tuple(choice[i] for i in rng.integers(len(choice), size=length))
    (fewest,) = _measure(program, evaluator, [best])
    for _ in range(evaluations - 1):
        changed = _changed(best, choice, rng)
        (count,) = _measure(program, evaluator, [changed])
        if count <= fewest:
            best, fewest = changed, count
    return _best([best], [fewest], evaluations)


def _changed(sequence: tuple[str, ...], choice: Sequence[str], rng: Generator) -> tuple[str, ...]:
    at, new = int(rng.integers(len(sequence))), choice[int(rng.integers(len(choice)))]
    before, after = sequence[:at], sequence[at + 1 :]
    changes = [(*before, new, *after)]
    if len(sequence) < LONGEST_WALK:
        changes.append((*before, new, *sequence[at:]))
    if len(sequence) > 1:
        changes.append((*before, *after))
    return changes[int(rng.integers(len(changes)))]


def _child(
    graph: SynergyGraph, ranked: Sequence[tuple[str, ...]], genetics: Genetics, rng: Generator
) -> tuple[str, ...]:
    """A child of two parents; `ranked` is best first, so the best of several rivals is the one drawn lowest."""
    mother, father = (ranked[rng.integers(len(ranked), size=genetics.rivals).min()] for _ in range(2))
    child = mother
    cut = int(rng.integers(1, len(mother)))
    joints = [at for at in range(1, len(father)) if (mother[cut - 1], father[at]) in graph.programs]
    if joints:
        child = (mother[:cut] + father[joints[rng.integers(len(joints))] :])[:LONGEST_WALK]
    if rng.random() < genetics.mutation:
        kept = int(rng.integers(1, len(child)))
        length = int(rng.integers(SHORTEST_WALK, LONGEST_WALK + 1))
        child = tuple(graph.walk_on(child[:kept], max(length, kept), rng))
    return child if len(child) >= SHORTEST_WALK else mother


def _measure(program: Program, evaluator: Evaluator, sequences: Sequences) -> list[float]:
    outcomes = evaluator.evaluate_all(program.content, sequences)
    return [float("inf") if outcome.instructions is None else outcome.instructions for outcome in outcomes]


def _best(sequences: Sequences, counts: Sequence[float], measured: int) -> Found:
    count, _, sequence = min((count, len(s), s) for count, s in zip(counts, sequences, strict=True))
    if count == float("inf"):
        raise ValueError("search: expected a sequence that runs to its end, found none")
    return Found(sequence, int(count), measured)
