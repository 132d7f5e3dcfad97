"""What is measured of one pair or one decision for `interp.retention_heads`, which says what the rows mean."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor

from counterfactuals import CounterfactualPair, Decision
from interp.attention import Cell, QueryRow, Span, block, continue_with, generate, head_grams, query_row, run_prefix
from interp.retention_failures import DECISION
from interp.stats import derive_rng
from interp.subject import Subject
from interp.tokens import AlignmentError, EncodedPair, encode_pair

COLUMNS = ("id", "group", "kind", "model", "key", "layer", "head", "metric", "value", "answer")
SLOT, EMPTY = "retain", "[]"
ANSWER_TOKENS = 24
DONOR_COUNTS = ("9", "8")  # what k's count is raised to: the largest of one digit, or the next if it is that already


@dataclass(frozen=True)
class Places:
    """Token positions of one entry of future_uses and what it is compared with.

    Attributes:
        entry: the key's first token to the value's last.
        key, value: its two parts; the punctuation between them counts as the key's.
        others: the other entries of the same prompt.
        region: what spans of the same length are taken from: from the first named span of the user message to the last.
    """

    entry: Span
    key: Span
    value: Span
    others: tuple[Span, ...]
    region: Span

    def matched(self) -> list[Span]:
        """All spans of the entry's length within the region that do not touch it."""
        (start, end), length = self.entry, self.entry[1] - self.entry[0]
        starts = range(self.region[0], self.region[1] - length + 1)
        return [(at, at + length) for at in starts if at + length <= start or at >= end]


class Measuring:
    """A subject and what is computed of it once: the Gram matrices of its heads, base and trained."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.switches: Mapping[str, Callable[[], AbstractContextManager]] = {
            "base": subject.base,
            "trained": subject.trained,
        }
        self._grams: dict[str, Tensor] = {}
        for model, switched in self.switches.items():
            with switched():
                self._grams[model] = head_grams(subject)

    def row(self, model: str, ids: Sequence[int]) -> QueryRow:
        """The last token's row; the subject must be switched to the model."""
        return query_row(self.subject, run_prefix(self.subject, ids), self._grams[model])


def decision_pair(decision: Decision) -> CounterfactualPair:
    """A decision as an identical pair, to be encoded like any other: a list that names something against the empty one.

    Raises:
        PairError: if it has no entry of the form `value:<id>`, or no list to choose but the empty one.
    """
    before, after = decision.around(SLOT)
    named = [text for text in (decision.slot_text(SLOT), *decision.choices[SLOT]) if text != EMPTY]
    entries = [name for name in decision.spans if name.startswith("value:")]
    return CounterfactualPair(
        id=decision.id,
        environment=decision.environment,
        kind=DECISION,
        messages_a=decision.messages,
        messages_b=decision.messages,
        action_prefix=before,
        answer=(named[0] if named else EMPTY) + after,
        foil=EMPTY + after,
        spans=dict(decision.spans) | ({"value": decision.spans[entries[0]]} if entries else {}),
        group=decision.group,
    )


def measure_pair(measuring: Measuring, pair: EncodedPair) -> pd.DataFrame:
    """The rows of one pair, prompt A, as described in `interp.retention_heads.measure`."""
    places = _places(pair.spans, "key", "value", [("other_key", "other_value")])
    matched = places.matched()
    spans = {"effect": places.entry, "effect_value": places.value}
    if places.others:
        spans["effect_other"] = places.others[0]
    if matched:
        rng = derive_rng(0, "retention_heads", "random span", pair.id)
        spans["effect_random"] = matched[int(rng.integers(len(matched)))]
    blocks = []
    for model, switched in measuring.switches.items():
        with switched():
            row = measuring.row(model, pair.ids_a)
            layers, heads, _ = row.attention.shape
            cells = [Cell(i, h, span) for span in spans.values() for i in range(layers) for h in range(heads)]
            blocked = block(measuring.subject, row, cells, (pair.answer[0], pair.foil[0])).double()
        difference = float(row.logits[pair.answer[0]] - row.logits[pair.foil[0]])
        effects = difference - (blocked[:, 0] - blocked[:, 1]).reshape(len(spans), layers, heads)
        blocks.append(_by_head(_looks(row, places) | dict(zip(spans, effects, strict=True)), model, "k"))
        blocks.append(_single(model, "k", {"difference": difference}))
    return _finished(blocks, pair)


def measure_decision(measuring: Measuring, encoded: EncodedPair, decision: Decision) -> pd.DataFrame:
    """The rows of one decision, as described in `interp.retention_heads.measure`."""
    tokenizer, entries = measuring.subject.tokenizer, _entry_ids(encoded)
    pays = {i for i, label in decision.labels.get("planner_retains", {}).items() if label == "pays"}
    blocks = []
    for model, switched in measuring.switches.items():
        with switched():
            row = measuring.row(model, encoded.ids_a)
            written = generate(measuring.subject, row.prefix, ANSWER_TOKENS, [tokenizer.eos_token_id])
            answer = listed_in(tokenizer, [*encoded.ids_a, *written], decision.around(SLOT)[0])
            retained = [str(i) for i in answer.ids or ()]
            found = [_single(model, "", _about_list(answer, entries))]
            for key in [i for i in entries if i in pays or i in retained]:
                others = [(f"key:{i}", f"value:{i}") for i in entries if i != key]
                places = _places(encoded.spans, f"key:{key}", f"value:{key}", others)
                found.append(_by_head(_looks(row, places), model, key))
                found.append(_single(model, key, {"retains": key in retained, "pays": key in pays}))
                if answer.ids is not None and answer.finished and key in pays and key not in retained:
                    found.append(_restored(measuring, model, decision, key, answer.ids))
        blocks.append(pd.concat(found, ignore_index=True).assign(answer=answer.text))
    return _finished(blocks, encoded)


def measure_any(measuring: Measuring, encoded: EncodedPair, decisions: Mapping[str, Decision]) -> pd.DataFrame:
    """The rows of a pair, or of the decision with its id."""
    if encoded.kind == DECISION:
        return measure_decision(measuring, encoded, decisions[encoded.id])
    return measure_pair(measuring, encoded)


def _entry_ids(encoded: EncodedPair) -> list[str]:
    return [name.removeprefix("value:") for name in encoded.spans if name.startswith("value:")]


def _places(spans: Mapping[str, Span], key: str, value: str, others: Sequence[tuple[str, str]]) -> Places:
    """The places of the entry whose key and value have these names; pairs made by hand may name no key."""
    start, end = spans.get(key, spans[value])[0], spans[value][1]
    middle = max(start + 1, spans[value][0]) if key in spans else end
    return Places(
        entry=(start, end),
        key=(start, middle),
        value=spans[value],
        others=tuple((spans[k][0], spans[v][1]) for k, v in others if k in spans and v in spans),
        region=(min(left for left, _ in spans.values()), max(right for _, right in spans.values())),
    )


def _looks(row: QueryRow, places: Places) -> dict[str, Tensor]:
    """Metric -> (L, H): attention, and attention times what it writes, on the entry and what it is compared with."""
    matched = places.matched()
    found = {}
    for name, per_token in (("attention", row.attention), ("written", row.attention * row.written)):
        sums = torch.nn.functional.pad(per_token.cpu().double().cumsum(-1), (1, 0))  # (L, H, T + 1)
        found[name] = _mean_over(sums, [places.entry])
        if places.others:
            found[f"{name}_other"] = _mean_over(sums, places.others)
        if matched:
            found[f"{name}_random"] = _mean_over(sums, matched)
        if name == "attention":
            found |= {
                "attention_key": _mean_over(sums, [places.key]),
                "attention_value": _mean_over(sums, [places.value]),
            }
    return found


def _mean_over(sums: Tensor, spans: Sequence[Span]) -> Tensor:
    """(L, H), the sum over each span, averaged over spans."""
    starts, ends = (torch.tensor(edges) for edges in zip(*spans, strict=True))
    return (sums[..., ends] - sums[..., starts]).mean(-1)


class Answer(NamedTuple):
    """What a model writes for a list: the text, the ids that it names (None if it is no list), whether it ends."""

    text: str
    ids: list[int] | None
    finished: bool


def listed_in(tokenizer: Any, ids: Sequence[int], before: str) -> Answer:
    """The list of ids that a text of tokens holds right after `before`; of one that does not end, the ids so far."""
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    _, found, written = text.rpartition(before)
    if not found:
        return Answer(text[-len(before) :], None, False)
    for attempt, finished in ((written, True), (written.rpartition(",")[0] + "]", False)):
        try:
            listed, end = json.JSONDecoder().raw_decode(attempt)
        except json.JSONDecodeError:
            continue
        if isinstance(listed, list) and all(type(i) is int for i in listed):
            return Answer(attempt[:end] if finished else written, listed, finished)
    return Answer(written, None, False)


def _about_list(answer: Answer, entries: Sequence[str]) -> dict[str, float]:
    if answer.ids is None:
        return {"list_length": float("nan"), "unfinished": 0.0, "unknown_ids": 0.0}
    unknown = sum(str(i) not in entries for i in answer.ids)
    return {"list_length": len(answer.ids), "unfinished": float(not answer.finished), "unknown_ids": unknown}


def _restored(measuring: Measuring, model: str, decision: Decision, key: str, listed: list[int]) -> pd.DataFrame:
    """Whether the list would name the key with the stream at the decision of a prompt in which its count is high.

    The decision is now the first token at which the list as written and the one with the key differ. The raised count
    is an intervention on the text; no environment proves it. Where the two prompts do not align, a row says so.
    """
    before, after = decision.around(SLOT)
    start, end = decision.spans[f"value:{key}"]
    donor = next(count for count in DONOR_COUNTS if count != decision.user[start:end])
    raised = {"role": "user", "content": decision.user[:start] + donor + decision.user[end:]}
    with_key = [*listed, int(key)] if listed != sorted(listed) else sorted([*listed, int(key)])
    try:
        pair = encode_pair(
            measuring.subject.tokenizer,
            replace(
                decision_pair(decision),
                messages_a=(*decision.messages[:-1], raised),
                spans={"value": (start, end)},
                action_prefix=before,
                answer=json.dumps(with_key) + after,
                foil=json.dumps(listed) + after,
            ),
        )
    except AlignmentError:
        return _single(model, key, {"not_aligned": 1.0})
    failed, raised_row = measuring.row(model, pair.ids_b), measuring.row(model, pair.ids_a)
    logits = continue_with(measuring.subject, failed, raised_row.streams).cpu().double()
    answer, foil = pair.answer[0], pair.foil[0]
    restored = logits[:, answer] - logits[:, foil]
    single = {
        "failed_difference": float(failed.logits[answer] - failed.logits[foil]),
        "donor_difference": float(raised_row.logits[answer] - raised_row.logits[foil]),
    }
    by_layer = pd.DataFrame({"layer": range(len(restored)), "value": restored.numpy()})
    by_layer = by_layer.assign(model=model, key=key, head=-1, metric="restored_difference")
    return pd.concat([_single(model, key, single), by_layer], ignore_index=True)


def _by_head(metrics: Mapping[str, Tensor], model: str, key: str) -> pd.DataFrame:
    frames = []
    for metric, values in metrics.items():
        layers, heads = values.shape
        index = pd.MultiIndex.from_product([range(layers), range(heads)], names=["layer", "head"])
        frames.append(
            pd.DataFrame({"value": values.flatten().numpy()}, index=index).reset_index().assign(metric=metric)
        )
    return pd.concat(frames, ignore_index=True).assign(model=model, key=key)


def _single(model: str, key: str, metrics: Mapping[str, float]) -> pd.DataFrame:
    frame = pd.DataFrame({"metric": list(metrics), "value": [float(value) for value in metrics.values()]})
    return frame.assign(model=model, key=key, layer=-1, head=-1)


def _finished(blocks: Sequence[pd.DataFrame], encoded: EncodedPair) -> pd.DataFrame:
    frame = pd.concat(blocks, ignore_index=True).assign(id=encoded.id, group=encoded.group, kind=encoded.kind)
    return (frame if "answer" in frame else frame.assign(answer=""))[list(COLUMNS)]
