"""The two rule sets: the one place in which they differ.

`DOCUMENTED` is the environment that the published README describes, `UPSTREAM` the one that was published, kept exact
so that adapters trained there can be analysed under it. A rule set is stateless: it reads texts, moves an `Episode` and
says what is seen and what is scored. Both share the graph, the topological order and the roofline.
"""

from __future__ import annotations

from collections.abc import Mapping

from env.scheduler.rules.base import INVALID_TEXT_REWARD, INVALID_TEXTS_IN_A_ROW, Rules, calibrated
from env.scheduler.rules.documented import Documented
from env.scheduler.rules.upstream import Upstream

__all__ = ["DOCUMENTED", "INVALID_TEXTS_IN_A_ROW", "INVALID_TEXT_REWARD", "RULES", "UPSTREAM", "Rules", "calibrated"]

DOCUMENTED = Documented()
UPSTREAM = Upstream()
RULES: Mapping[str, Rules] = {rules.name: rules for rules in (DOCUMENTED, UPSTREAM)}
