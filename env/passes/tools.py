"""The two tools that the agent may call. What cannot be done is told in the response, as `"status": "error"`.

Upstream, an `opt` that fails hands back the program as it was, which counts as a very bad result; here it is an error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from env.passes.catalogue import PassError
from env.passes.evaluator import Evaluator
from env.passes.programs import Program
from env.passes.search import Genetics, genetic_search
from env.passes.synergy import SynergyGraph

INSTRCOUNT, FIND_BEST = "instrcount", "find_best_pass_sequence"

Response = dict[str, Any]


@dataclass(frozen=True)
class Tools:
    """The tools, for one program.

    Attributes:
        program: the only file that they know.
        evaluator: what measures it.
        graph: what the search goes along.
        genetics: the size of the search.
    """

    program: Program
    evaluator: Evaluator
    graph: SynergyGraph
    genetics: Genetics

    def call(self, name: str, arguments: Mapping[str, Any], number: int = 0) -> Response:
        """The response to a call.

        Args:
            name: of the tool.
            arguments: as the agent wrote them.
            number: of the calls before this one; the search draws by it and the program alone.
        """
        if name not in (INSTRCOUNT, FIND_BEST):
            return error(f"tool: expected {INSTRCOUNT} or {FIND_BEST}, found {name[:60]!r}")
        if (filename := arguments.get("filename")) != self.program.name:
            return error(f"filename: expected {self.program.name!r}, found {str(filename)[:60]!r}")
        if name == FIND_BEST:
            return self._find_best(number)
        return self._instrcount(arguments.get("optimization_flags"))

    def _instrcount(self, flags: Any) -> Response:
        if not isinstance(flags, list) or not flags:
            return error("optimization_flags: expected a list of at least one pass")
        try:
            outcome = self.evaluator.evaluate(self.program.content, flags)
        except PassError as problem:
            return error(str(problem))
        if outcome.instructions is None:
            return error(outcome.failure)
        improvement = round(self.program.over_oz(outcome.instructions), 6)
        return {"filename": self.program.name, "status": "success", "improvement_over_oz": improvement}

    def _find_best(self, number: int) -> Response:
        seed = int.from_bytes(hashlib.sha256(self.program.content).digest()[:8], "big")
        rng = np.random.default_rng([seed, number])
        found = genetic_search(self.program, self.graph, self.evaluator, rng, self.genetics)
        improvement = round(100 * self.program.over_oz(found.instructions), 2)
        return {
            "status": "success",
            "best_pass_sequence": list(found.sequence),
            "improvement_percentage": improvement,
        }


def error(problem: str) -> Response:
    """The response to a call that cannot be done."""
    return {"status": "error", "error": problem}
