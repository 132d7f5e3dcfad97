"""A small program in a world where it beats -Oz, and one where it cannot, with a graph of four passes."""

from env.passes.evaluator import shared_evaluator
from env.passes.programs import Program
from env.passes.search import Genetics
from env.passes.synergy import SynergyGraph
from tests.passes.modules import SMALL

NAME = "hand/small"
GOOD = ["--mem2reg", "--instcombine"]
IDLE = ["--lcssa"]
PASSES = ("--instcombine", "--mem2reg", "--lcssa", "--simplifycfg")
GRAPH = SynergyGraph.of([[(a, b) for a in PASSES for b in PASSES if a != b]])
TINY = Genetics(population=8, generations=2, kept=2)


def small(oz_instructions=None):
    """The program of 7 instructions, of which 1 can be left; -Oz leaves what the world says, or really leaves."""
    program = Program.measured(NAME, SMALL, shared_evaluator())
    if oz_instructions is None:
        return program
    return Program(NAME, SMALL, program.instructions, oz_instructions, program.features)
