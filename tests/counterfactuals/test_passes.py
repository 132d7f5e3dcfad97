"""Pairs of the pass-ordering dialogue are proved by the environment, and the analyses take them as they are."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from transformers import AutoTokenizer

from counterfactuals import CounterfactualPair, PairError, ir_edits, read_pairs, write_pairs
from counterfactuals.ir_edits import Edit, Promotion, constant_edits, promotions, slot_edits, textual
from counterfactuals.passes import SPLITS, generate_pairs, main, prove
from counterfactuals.passes_moments import AT_THE_QUESTION, DECIDE, KINDS, MEM2REG, Moment, PairRefused, search_text
from env.passes import PassesEnv, Program, load_program, shared_evaluator
from env.passes.action import answer_text
from env.passes.prompts import question
from env.passes.synergy import read_graph
from interp import patching
from interp.base_models import BUILT_IN, find_base
from interp.tokens import encode_pairs
from tests.interp.tiny import save_adapter, save_base, tiny_tokenizer
from tests.passes.worlds import TINY

COUNT = 2
FLIPS = ("improvement_over_oz", "digit_edit")
RESPONSES = tuple(kind for kind in KINDS if kind not in AT_THE_QUESTION)


@pytest.fixture(scope="module")
def pairs():
    return {kind: generate_pairs(COUNT, 1, kind=kind) for kind in KINDS}


def modules(pair):
    """The modules of A and of B, by measuring the texts that the pair carries."""
    program = load_program(pair.meta["program"])
    edit = pair.meta["edit"]
    lines = textual(program.name).split("\n")
    if pair.kind == MEM2REG:
        lines = Promotion(**edit).applied(program.name).split("\n")
    elif edit:
        lines[edit["line"]] = edit["text"]
    edited = Program.measured(program.name, "\n".join(lines).encode(), shared_evaluator())
    return (edited, program) if pair.meta["a_is_edited"] else (program, edited)


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_are_proved_and_survive_their_file(pairs, kind, tmp_path):
    write_pairs(pairs[kind], tmp_path / "pairs.jsonl")
    again = read_pairs(tmp_path / "pairs.jsonl")
    assert again == pairs[kind]
    for pair in again:
        prove(pair)
        assert load_program(pair.group).split in SPLITS


@pytest.mark.parametrize("kind", ["improvement_over_oz", "same_sign"])
def test_both_prompts_are_what_the_environment_shows(pairs, kind):
    """Each side is an episode of a real module, to the character."""
    for pair in pairs[kind]:
        for module, shown in zip(modules(pair), (pair.messages_a, pair.messages_b), strict=True):
            env = PassesEnv(module)
            observation, _ = env.reset()
            assert observation == shown[1]["content"]
            observation, *_ = env.step(shown[2]["content"])
            assert observation == shown[3]["content"]


def test_the_answer_is_on_a_valid_path_in_a_and_the_foil_in_b(pairs):
    for pair in pairs["improvement_over_oz"]:
        tags = {"a": pair.answer, "b": pair.foil}
        for side, module in zip("ab", modules(pair), strict=True):
            number, opening = pair.meta["numbers"][side], pair.action_prefix + tags[side]
            env = PassesEnv(module, genetics=TINY)
            env.step(pair.messages_a[2]["content"])
            if number > 0:
                turn = answer_text(DECIDE, pair.meta["sequence"])
                *_, info = env.step(turn)
                assert info["valid_path"]
                assert info["score"] == pytest.approx(number, abs=1e-6)
            else:
                turn = search_text(pair.meta["program"])
                env.step(turn)
                assert env.episode.exchanges[-1].response["status"] == "success"
            assert turn.startswith(opening)
            assert opening.endswith("<answer>" if number > 0 else "<tool_call>")


@pytest.mark.parametrize("kind", RESPONSES)
def test_the_signs_are_those_of_the_kind(pairs, kind):
    for pair in pairs[kind]:
        a, b = float(pair.value_a), float(pair.value_b)
        assert pair.meta["numbers"] == {"a": a, "b": b}
        assert (a * b < 0) == (kind in FLIPS)
        assert (pair.user_a == pair.user_b) == (kind == "identical")
        assert pair.answer.startswith("<answer>") == (a > 0)
        assert pair.foil.startswith("<answer>") == (a < 0)
        assert pair.meta["on_manifold"] == (kind != "digit_edit")
        assert len(pair.value_a.strip(" -")) == len(pair.value_b.strip(" -"))
        start, end = pair.spans["key"]
        assert pair.user_a[start:end] == '"improvement_over_oz"'


def test_one_feature_of_two_real_modules_differs(pairs):
    for pair in pairs["single_feature"]:
        a, b = (module.named_features() for module in modules(pair))
        (feature,) = pair.meta["values"]["a"]
        assert [name for name in a if a[name] != b[name]] == [feature]
        assert (int(pair.value_a), int(pair.value_b)) == (a[feature], b[feature])


@pytest.mark.parametrize("kind", AT_THE_QUESTION)
def test_both_questions_call_for_a_measurement(pairs, kind):
    for pair in pairs[kind]:
        assert [message["role"] for message in pair.messages_a] == ["system", "user"]
        assert [shown[1]["content"] for shown in (pair.messages_a, pair.messages_b)] == [
            question(module) for module in modules(pair)
        ]
        assert pair.answer.startswith("<tool_call>")
        assert pair.foil.startswith("<answer>")


def test_after_mem2reg_of_a_variable_one_slot_less_is_there(pairs):
    for pair in pairs[MEM2REG]:
        after, before = (pair.meta["values"][side] for side in ("ab" if pair.meta["a_is_edited"] else "ba"))
        assert before["NumAllocaInst"] - after["NumAllocaInst"] == 1
        assert all(after[name] < before[name] for name in ("TotalMemInst", "TotalInsts", "Initial instruction count"))


def test_a_zero_that_becomes_seven_changes_one_feature():
    text = "define i32 @f(i32 %0) {\n  %2 = alloca i32, align 4\n  store i32 0, ptr %2, align 4\n  ret i32 %0\n}\n"
    edits = list(constant_edits(text))
    assert edits == [Edit(2, "  store i32 7, ptr %2, align 4")]
    lines = text.split("\n")
    lines[2] = edits[0].text
    before, after = (
        Program.measured("f", content.encode(), shared_evaluator()).named_features()
        for content in (text, "\n".join(lines))
    )
    assert {name: (before[name], after[name]) for name in before if before[name] != after[name]} == {
        "numConstZeroes": (1, 0)
    }


def test_slots_are_exchanged_within_a_function_and_a_type():
    text = "\n".join(
        [
            "define i32 @f() {",
            "  %1 = alloca i32, align 4",
            "  %2 = alloca i32, align 4",
            "  %3 = alloca i64, align 8",
            "  %4 = load i32, ptr %1, align 4",
            "  store i64 1, ptr %3, align 8",
            "}",
            "define i32 @g() {",
            "  %1 = alloca i32, align 4",
            "  %2 = load i32, ptr %1, align 4",
            "}",
        ]
    )
    assert list(slot_edits(text)) == [Edit(4, "  %4 = load i32, ptr %2, align 4")]


def test_mem2reg_of_one_variable_leaves_the_others(monkeypatch):
    text = "\n".join(
        [
            "define i32 @f(i32 %0) {",
            "  %2 = alloca i32, align 4",
            "  %3 = alloca i32, align 4",
            "  store i32 %0, ptr %2, align 4",
            "  store i32 1, ptr %3, align 4",
            "  %4 = load i32, ptr %2, align 4",
            "  ret i32 %4",
            "}",
        ]
    )
    assert list(promotions(text)) == [Promotion(1), Promotion(2)]
    monkeypatch.setattr(ir_edits, "textual", lambda name: text)
    (body,) = re.findall(r"\{\n(.*)\n\}", Promotion(1).applied("f"), re.DOTALL)
    assert [line.strip() for line in body.split("\n")] == [
        "%2 = alloca i32, align 4",
        "store i32 1, ptr %2, align 4",
        "ret i32 %0",
    ]
    with pytest.raises(ValueError, match="expected a variable's slot"):
        Promotion(3).applied("f")


def test_an_edit_that_the_question_shows_is_refused():
    name = "musl/env/unsetenv"
    zero = next(constant_edits(textual(name)))
    moment = Moment(name, zero, tuple(read_graph().walks(1, np.random.default_rng(0), 10, 14)[0]))
    with pytest.raises(PairRefused, match="question"):
        moment.responses()


def test_a_changed_pair_is_not_proved(pairs):
    pair = pairs["improvement_over_oz"][0]
    for change in (
        {"edit": None},
        {"sequence": ["--sroa"]},
        {"program": "none"},
        {"edit": {"line": 10**6, "text": ""}},
    ):
        with pytest.raises(PairRefused, match=pair.id):
            prove(replace(pair, meta={**pair.meta, **change}))


def test_pairs_have_names_for_ever_and_a_larger_count_begins_alike(pairs):
    assert generate_pairs(2, 1, kind="identical") == pairs["identical"][:2]
    with pytest.raises(PairError, match=r"kind: expected one of .*found 'other'"):
        generate_pairs(1, 0, kind="other")


def test_pairs_align_but_for_a_sign_that_is_a_token_more(pairs):
    """The tiny tokenizer has no token for a space and a minus sign."""
    _, left_out = encode_pairs(tiny_tokenizer(), [pair for kind in KINDS for pair in pairs[kind]])
    assert left_out == [(pair.id, "length differs") for kind in KINDS if kind in FLIPS for pair in pairs[kind]]


@pytest.mark.slow
def test_every_pair_aligns_for_the_built_in_model(pairs):
    tokenizer = AutoTokenizer.from_pretrained(find_base(BUILT_IN).path)
    encoded, left_out = encode_pairs(tokenizer, [pair for kind in KINDS for pair in pairs[kind]])
    assert left_out == []
    for pair in encoded:
        assert {tokenizer.decode([tokens[0]]) for tokens in (pair.answer, pair.foil)} == {"answer", "tool"}


@pytest.mark.slow
def test_patching_takes_them(pairs, tmp_path):
    base = save_base(tmp_path / "base", max_position_embeddings=8192)
    adapter = save_adapter(tmp_path / "adapter", base)
    write_pairs(pairs["same_sign"][:1], tmp_path / "pairs.jsonl")
    arguments = ["--adapter", str(adapter), "--pairs", str(tmp_path / "pairs.jsonl"), "--out", str(tmp_path / "out")]
    assert patching.main([*arguments, "--quiet"]) == 0
    summary = json.loads((tmp_path / "out" / "adapter" / "patching" / "summary.json").read_text())
    assert (summary["kinds"]["same_sign"]["pairs"], summary["left_out"]) == (1, [])


def test_the_command_writes_and_proves(tmp_path, capsys):
    out = tmp_path / "pairs.jsonl"
    assert main(["--count", "1", "--kind", "identical", "--kind", "digit_edit", "--out", str(out), "--quiet"]) == 0
    assert {pair.kind for pair in read_pairs(out)} == {"identical", "digit_edit"}
    assert main(["--prove", str(out)]) == 0
    assert "2 pairs" in capsys.readouterr().out
    record = json.loads(out.read_text().splitlines()[0])
    record["meta"]["sequence"] = ["--sroa"]
    out.write_text(json.dumps(record) + "\n")
    assert main(["--prove", str(out), "--quiet"]) == 2
    assert CounterfactualPair(**record).id in capsys.readouterr().err
