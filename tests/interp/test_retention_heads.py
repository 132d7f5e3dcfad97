"""The rows that are measured of pairs and decisions on a tiny model, and the command."""

import json

import numpy as np
import pytest

from counterfactuals import generate_decisions, generate_pairs, write_decisions, write_pairs
from interp.retention_heads import decision_pair, main, measure
from interp.retention_measure import COLUMNS, Measuring, _restored, listed_in
from interp.subject import Subject
from interp.tokens import encode_pair, encode_pairs
from tests.interp.tiny import tiny_pair_folders, tiny_tokenizer


@pytest.mark.parametrize(
    ("written", "ids", "finished"),
    [(" [3, 7]}", [3, 7], True), (" []}", [], True), (" [1, 2, 3", [1, 2], False), (" no", None, False),
     (' ["a"]', None, False), (" 7}", None, False)],
)  # fmt: skip
def test_lists_are_read_as_written(written, ids, finished):
    tokenizer = tiny_tokenizer()
    tokens = tokenizer('user: {"retain": [5]} {"retain":' + written, add_special_tokens=False)["input_ids"]
    found = listed_in(tokenizer, tokens, '{"retain": ')
    assert (found.ids, found.finished) == (ids, finished)


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    adapter, _ = tiny_pair_folders(tmp_path_factory.mktemp("tiny"))
    return adapter, generate_pairs(3, 0), generate_decisions(2, 0)


def test_a_decision_is_encoded_up_to_its_list(material):
    adapter, _, decisions = material
    tokenizer = Subject.load(adapter).tokenizer
    encoded = encode_pair(tokenizer, decision_pair(decisions[0]))
    assert tokenizer.decode(encoded.ids_a).endswith('"retain":')
    uses = json.loads(decisions[0].user)["future_uses"]
    for i, count in uses.items():
        start, end = encoded.spans[f"value:{i}"]
        assert tokenizer.decode(encoded.ids_a[start:end]) == str(count)


def test_measure_gives_what_its_docstring_says(material):
    adapter, pairs, decisions = material
    subject = Subject.load(adapter)
    encoded, _ = encode_pairs(subject.tokenizer, pairs[:1])
    frame = measure(subject, encoded, decisions[:1])
    assert tuple(frame.columns) == COLUMNS
    assert set(frame["model"]) == {"base", "trained"}
    pair = frame[(frame["kind"] == "future_uses") & (frame["model"] == "trained")]
    wide = pair[pair["head"] >= 0].pivot(index=["layer", "head"], columns="metric", values="value")
    assert len(wide) == 16
    assert np.allclose(wide["attention"], wide["attention_key"] + wide["attention_value"])
    assert ((wide["attention"] >= 0) & (wide["attention"] <= 1)).all()
    assert (wide["effect"].abs() > 1e-4).any()
    assert not wide.isna().any().any()
    with pytest.raises(ValueError, match="at least one"):
        measure(subject, [], [])


def test_a_failure_patched_above_all_layers_becomes_its_donor(material):
    adapter, _, decisions = material
    subject, decision = Subject.load(adapter), decisions[0]
    uses = json.loads(decision.user)["future_uses"]
    key = next(i for i, count in uses.items() if 0 < count < 9)
    with subject.trained():
        frame = _restored(Measuring(subject), "trained", decision, key, [])
    single = frame[frame["layer"] < 0].set_index("metric")["value"]
    restored = frame[frame["metric"] == "restored_difference"].set_index("layer")["value"]
    assert list(restored.index) == [0, 1, 2, 3, 4]
    assert restored[4] == pytest.approx(single["donor_difference"], abs=1e-4)
    # the last token is the same in both prompts, so its stream carries nothing of the count yet
    assert restored[0] == pytest.approx(single["failed_difference"], abs=1e-4)
    assert abs(single["donor_difference"] - single["failed_difference"]) > 1e-3


def test_the_command_writes_its_folder(material, tmp_path, capsys):
    adapter, pairs, decisions = material
    write_pairs(pairs, tmp_path / "pairs.jsonl")
    write_decisions(decisions, tmp_path / "decisions.jsonl")
    argv = ["--adapter", str(adapter), "--pairs", str(tmp_path / "pairs.jsonl"), "--out", str(tmp_path)]
    argv += ["--decisions", str(tmp_path / "decisions.jsonl")]
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "no claim: expected at least 12 graphs, found 3" in out
    folder = tmp_path / "adapter" / "retention_heads"
    written = {path.name for path in folder.iterdir()}
    assert written >= {"results.parquet", "summary.json", "run.json", "examples.json", "decisions.jsonl",
                       "retention_heads.pdf", "retention_heads.png", "spans.pdf", "spans.png"}  # fmt: skip
    assert json.loads((folder / "summary.json").read_text())["decisions"] == 2
