"""Why retention fails where it would pay: the number was not read, or what was read did not become the decision.

A failure is a tensor k in a decision such that the planner says that retaining it pays and the model's list leaves it
out; a success, one that it lists. With the confirmed readers at hand (`interp.retention_heads_summary`),

    retrieval    their attention to k's entry, averaged over readers, is below the 10th percentile of the successes';
    downstream   it is not, and the list would name k if the stream that enters the layer after the last reader were
                 that of the same prompt with a high count of k;
    unresolved   neither, or it could not be tested (no readers, too few successes, prompts that do not align).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from interp.stats import ClusterBootstrap, derive_rng

DECISION = "decision"  # the kind, in frames, of what is no pair
LOW_PERCENTILE, SUCCESSES = 10, 10
CLASSES = ("retrieval", "downstream", "unresolved")
EXAMPLES = 5

Head = tuple[int, int]


def keys_with(rows: pd.DataFrame, **flags: int) -> pd.DataFrame:
    """id and key of each tensor in a decision whose flags (`retains`, `pays`) have these values.

    Args:
        rows: of one model, of `interp.retention_heads.measure`.
    """
    wide = rows[rows["metric"].isin(["retains", "pays"])].pivot(index=["id", "key"], columns="metric", values="value")
    keep = np.ones(len(wide), dtype=bool)
    for name, value in flags.items():
        keep &= (wide[name] == value).to_numpy() if len(wide) else False
    return wide[keep].reset_index()[["id", "key"]]


def reader_attention(rows: pd.DataFrame, readers: Sequence[Head]) -> pd.DataFrame:
    """id, key, group, and a column of attention to the key's entry for each reader, named by (layer, head)."""
    part = rows[(rows["metric"] == "attention") & pd.MultiIndex.from_frame(rows[["layer", "head"]]).isin(list(readers))]
    wide = part.pivot(index=["id", "key", "group"], columns=["layer", "head"], values="value")
    wide.columns = wide.columns.to_flat_index()
    return wide.reset_index()


def sort_failures(rows: pd.DataFrame, readers: Sequence[Head], seed: int) -> dict[str, Any]:
    """Counts and shares of the failures of one model by class, ready for JSON, and each of them.

    Args:
        rows: of one model's decisions.
        readers: (layer, head) of the confirmed readers.
        seed: of the resampling.
    """
    successes, failures = keys_with(rows, pays=1, retains=1), keys_with(rows, pays=1, retains=0)
    no_list = (rows["metric"] == "list_length") & rows["value"].isna()
    unfinished = (rows["metric"] == "unfinished") & (rows["value"] == 1)
    open_ended = int(failures["id"].isin(rows.loc[no_list | unfinished, "id"]).sum())
    record: dict[str, Any] = {"pays": len(successes) + len(failures), "retained": len(successes)}
    record |= {"failures": len(failures), "without_a_finished_list": open_ended, "threshold": None}
    record["not_aligned"] = int((rows["metric"] == "not_aligned").sum())
    found, why = failures.assign(**{"class": "unresolved"}), None
    if not readers:
        why = "no confirmed readers"
    elif len(successes) < SUCCESSES:
        why = f"{len(successes)} successes to set the threshold, at least {SUCCESSES} are needed"
    elif len(failures):
        attention = reader_attention(rows, readers)
        mean = attention.assign(mean=attention[list(readers)].mean(axis=1))[["id", "key", "mean"]]
        threshold = float(np.percentile(successes.merge(mean, on=["id", "key"])["mean"], LOW_PERCENTILE))
        record["threshold"] = threshold
        found = _classified(
            failures.merge(mean, on=["id", "key"]), rows, 1 + max(layer for layer, _ in readers), threshold
        )
    counts = Counter(found["class"])
    record |= {"counts": {name: counts[name] for name in CLASSES}, "shares": _shares(found, rows, seed)}
    record |= {"why_unresolved": why, "each": found.astype(object).where(found.notna(), None).to_dict("records")}
    return {"statement": _statement(record), **record}


def examples(frame: pd.DataFrame, summary: dict[str, Any]) -> list[dict[str, Any]]:
    """Up to `EXAMPLES` failures of each class and model, with what the model writes and each reader's attention."""
    shown = []
    for model, found in summary["models"].items():
        rows = frame[(frame["kind"] == DECISION) & (frame["model"] == model)]
        readers = [(reader["layer"], reader["head"]) for reader in found["readers"]]
        attention = reader_attention(rows, readers).set_index(["id", "key"]) if readers else None
        each = pd.DataFrame(found["failures"]["each"])
        if each.empty:
            continue
        for _, failure in each.groupby("class", sort=False).head(EXAMPLES).iterrows():
            written = rows.loc[rows["id"] == failure["id"], "answer"].iloc[0]
            by_reader = {}
            if attention is not None:
                row = attention.loc[(failure["id"], failure["key"])]
                by_reader = {f"L{layer}H{head}": round(float(row[layer, head]), 4) for layer, head in readers}
            shown.append(
                {"id": failure["id"], "model": model, "key": failure["key"], "class": failure["class"],
                 "writes": written, "attention": by_reader}
            )  # fmt: skip
    return shown


def _classified(failures: pd.DataFrame, rows: pd.DataFrame, layer: int, threshold: float) -> pd.DataFrame:
    """Failures with their class, and what the patch at the layer gives (NaN where it was not measured)."""
    at_layer = rows[(rows["metric"] == "restored_difference") & (rows["layer"] == layer)]
    restored = at_layer[["id", "key", "value"]].rename(columns={"value": "restored"})
    found = failures.merge(restored, on=["id", "key"], how="left")
    low = found["mean"] < threshold
    found["class"] = np.select([low, found["restored"] > 0], ["retrieval", "downstream"], "unresolved")
    return found.rename(columns={"mean": "attention"})


def _shares(found: pd.DataFrame, rows: pd.DataFrame, seed: int) -> dict[str, Any] | None:
    """Class -> share of the failures, with its interval over graphs."""
    if found.empty:
        return None
    groups = found["id"].map(rows.drop_duplicates("id").set_index("id")["group"])
    bootstrap = ClusterBootstrap.draw(groups.tolist(), derive_rng(seed, "retention_heads", "failures"))
    return {
        name: bootstrap.interval(bootstrap.means((found["class"] == name).to_numpy(dtype=float))).to_json()
        for name in CLASSES
    }


def _statement(record: dict[str, Any]) -> str:
    if not record["pays"]:
        return "no decision in which retaining a tensor pays."
    said = f"of {record['pays']} tensors that it pays to retain, {record['retained']} are"
    if not record["failures"]:
        return f"{said}."
    counts = record["counts"]
    sorted_by = f"{counts['retrieval']} retrieval, {counts['downstream']} downstream, {counts['unresolved']} unresolved"
    because = f" ({record['why_unresolved']})" if record["why_unresolved"] else ""
    return f"{said}; the {record['failures']} failures: {sorted_by}{because}."
