"""The runs of one pair through base and trained model, and the rows of the patching result that come from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from interp.components import patch_component
from interp.flip import METRIC, MODELS, RECOVERY_EPS
from interp.stats import recovery
from interp.subject import Subject
from interp.sweep import Patched, Run, patch, run_pair
from interp.tokens import EncodedPair

COLUMNS = (
    "pair", "group", "kind", "model", "direction", "position", "component", "head", "layer", "metric", "value",
)  # fmt: skip
POSITIONS = ("value", "key", "between", "decision")
NONE: dict[str, Any] = {"position": "none", "component": "none", "head": -1, "layer": -1}


def places(pair: EncodedPair) -> dict[str, tuple[int, ...]]:
    """Token positions by name, patched together: `value`, `decision`, and where the pair has them `key`, `between`.

    `key` is the changed value's key; `between` is everything after the value and before the decision.
    """
    value = pair.value_positions
    found = {"value": value, "decision": (pair.decision,)}
    if "key" in pair.spans:
        found["key"] = tuple(i for i in range(*pair.spans["key"]) if i not in value)
    found["between"] = tuple(range(value[-1] + 1, pair.decision))
    return {name: positions for name, positions in found.items() if positions}


@dataclass(frozen=True)
class PairRuns:
    """One pair through both models, A and B.

    Attributes:
        runs: (model, `baseline_a` or `baseline_b`) -> run.
        metrics: the same -> metric -> (1,).
    """

    subject: Subject
    pair: EncodedPair
    runs: Mapping[tuple[str, str], Run]
    metrics: Mapping[tuple[str, str], Mapping[str, Tensor]]

    @classmethod
    def make(cls, subject: Subject, pair: EncodedPair) -> PairRuns:
        """Run them."""
        runs: dict[tuple[str, str], Run] = {}
        for model in MODELS:
            with switched(subject, model):
                runs[model, "baseline_a"], runs[model, "baseline_b"] = run_pair(subject, pair)
        metrics = {key: metrics_of(run, runs[key[0], "baseline_a"], pair) for key, run in runs.items()}
        return cls(subject, pair, runs, metrics)

    def baselines(self) -> list[pd.DataFrame]:
        """The rows of the four runs."""
        return [self.rows(found, model, side, **NONE) for (model, side), found in self.metrics.items()]

    def patched(
        self,
        model: str,
        direction: str,
        position: str,
        recipient: Run,
        donor: Run,
        positions: Sequence[int],
        *,
        component: str = "residual",
        layers: Sequence[int] | None = None,
        ends: tuple[tuple[str, str], tuple[str, str]] | None = None,
        light: bool = False,
    ) -> pd.DataFrame:
        """The rows of one sweep. Positions before the two runs begin to differ hold the same in both: nothing moves.

        Args:
            ends: the runs at which recovery is 0 and 1; None is the model's own B and A.
            layers: ascending; None is all that the component has.
            light: take the logit difference and its recovery only, from runs without the answer's later tokens.
        """
        if light:
            recipient, donor = recipient.to_decision(), donor.to_decision()
        later = [position for position in positions if position >= max(recipient.start, donor.start)]
        asked = list(range(self.subject.n_layers + (component == "residual")) if layers is None else layers)
        with switched(self.subject, model):
            if not later:
                found = unchanged(recipient, len(asked))
            elif component == "residual":
                found = patch(self.subject, recipient, donor, later, asked)
            else:
                found = patch_component(self.subject, recipient, donor, later, component, asked)
        metrics = metrics_of(found, self.runs[model, "baseline_a"], self.pair, light=light)
        start, end = (self.metrics[key][METRIC] for key in ends or ((model, "baseline_b"), (model, "baseline_a")))
        metrics["recovery"] = torch.from_numpy(recovery(metrics[METRIC], start, end, RECOVERY_EPS))
        numbers, heads = numbering(len(found.logits), component, asked)
        return self.rows(metrics, model, direction, position=position, component=component, layer=numbers, head=heads)

    def rows(
        self,
        metrics: Mapping[str, Tensor],
        model: str,
        direction: str,
        *,
        position: str,
        component: str,
        head: int | Sequence[int],
        layer: int | Sequence[int],
    ) -> pd.DataFrame:
        """(n,) metrics as n rows each, in the columns of the result."""
        wide = pd.DataFrame({metric: np.asarray(values, dtype=np.float64) for metric, values in metrics.items()})
        wide = wide.assign(layer=layer, head=head)
        long = wide.melt(id_vars=["layer", "head"], var_name="metric", value_name="value")
        pair = {"pair": self.pair.id, "group": self.pair.group, "kind": self.pair.kind}
        return long.assign(**pair, model=model, direction=direction, position=position, component=component)[
            list(COLUMNS)
        ]


def switched(subject: Subject, model: str) -> AbstractContextManager:
    """The subject switched to `base` or `trained`."""
    contexts: dict[str, Callable[[], AbstractContextManager]] = {"base": subject.base, "trained": subject.trained}
    return contexts[model]()


def metrics_of(found: Run | Patched, reference: Run, pair: EncodedPair, *, light: bool = False) -> dict[str, Tensor]:
    """Metric -> (n,) in float64; n is 1 for a run and the number of cells for patched ones."""
    logits = torch.atleast_2d(found.logits)  # (n, vocab)
    answer, foil = pair.answer[0], pair.foil[0]
    difference = logits[:, answer].cpu().double() - logits[:, foil].cpu().double()
    if light:
        return {METRIC: difference}
    log_probs = logits.cpu().double().log_softmax(-1)
    log_reference = reference.logits.cpu().double().log_softmax(-1)  # (vocab,)
    answer_log_prob = torch.atleast_1d(torch.as_tensor(found.answer_log_prob)).cpu().double()
    return {
        METRIC: difference,
        "p_answer": answer_log_prob.exp(),
        "p_first_answer": log_probs[:, answer].exp(),
        "p_first_foil": log_probs[:, foil].exp(),
        "kl": (log_reference.exp() * (log_reference - log_probs)).sum(-1),
    }


def unchanged(run: Run, cells: int) -> Patched:
    """As many cells as asked for in which nothing has moved."""
    return Patched(run.logits.repeat(cells, 1), run.logits.new_full((cells,), run.answer_log_prob))


def numbering(cells: int, component: str, layers: Sequence[int]) -> tuple[list[int], list[int]]:
    """The layer and the head of each cell; -1 where it is of no single head."""
    each = cells // len(layers)
    heads = list(range(each)) if component == "heads" else [-1]
    return [layer for layer in layers for _ in heads], heads * len(layers)


def every_third(n: int) -> list[int]:
    """Every third of 0 to n - 1, and the last: enough of a curve where a cell is dear."""
    return sorted({*range(0, n, 3), n - 1})
