"""The pair contract: what is stored is read again, and what breaks it is named."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterfactuals import CounterfactualPair, PairError, generate_pairs, read_pairs, write_pairs
from counterfactuals.__main__ import main


def pair(before="uses: ", a="2", b="0", after=" end", **changes):
    fields = {
        "id": "p",
        "environment": "any",
        "kind": "count",
        "messages_a": ({"role": "system", "content": "s"}, {"role": "user", "content": before + a + after}),
        "messages_b": ({"role": "system", "content": "s"}, {"role": "user", "content": before + b + after}),
        "action_prefix": "keep ",
        "answer": "yes",
        "foil": "no",
        "spans": {"value": (len(before), len(before) + len(a))},
        "group": "g",
    }
    return CounterfactualPair(**(fields | changes))


text = st.text(max_size=12)


@given(text, st.text(min_size=1, max_size=4), text, text)
def test_pairs_survive_a_line(before, a, b, after):
    made = pair(before, a, b, after)
    assert CounterfactualPair.from_json(made.to_json()) == made
    assert (made.value_a, made.value_b) == (a, b)
    assert "\n" not in made.to_json()


def test_the_value_may_be_of_another_length_in_b():
    assert pair(a="10", b="0").value_b == "0"


def test_digits_that_recur_do_not_move_the_value():
    made = pair(before='{"1":0,"11":', a="10", b="0", after=',"0":10}')
    assert (made.value_a, made.value_b) == ("10", "0")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id": ""}, "id: expected a string that is not empty, found ''"),
        ({"id": 3}, "id: expected a string, found 3"),
        ({"foil": "yes"}, "foil: expected a text other than the answer, found 'yes'"),
        ({"spans": {}}, "spans: expected an object with the key value"),
        ({"spans": {"value": (6, 6)}}, r"spans.value: expected 0 <= start < end <= 11"),
        ({"spans": {"value": (6, 99)}}, r"spans.value: expected 0 <= start < end <= 11"),
        ({"spans": {"value": (0, 1)}}, "found a difference at character 6"),
        ({"spans": {"value": [6]}}, r"spans.value: expected \[start, end\]"),
        ({"spans": {"value": (6, 7), "key": (True, 2)}}, r"spans.key: expected \[start, end\]"),
        ({"messages_a": ()}, "messages_a: expected a list of chat messages"),
        ({"messages_a": ({"role": "user"},)}, "messages_a: expected messages of role and content"),
        (
            {"messages_b": ({"role": "assistant", "content": "x"},)},
            "messages_b: expected a last message with role user",
        ),
        ({"messages_b": ({"role": "user", "content": "uses: 0 end"},)}, "messages_b: expected the same messages"),
        ({"meta": [1]}, "meta: expected an object"),
    ],
)
def test_what_breaks_the_contract_is_named(changes, message):
    with pytest.raises(PairError, match=message):
        pair(**changes)


def test_every_broken_line_of_a_file_is_named(tmp_path):
    good = pair().to_json()
    record = json.loads(good)
    lines = [
        good,
        "",
        "{",
        "[1]",
        json.dumps({key: value for key, value in record.items() if key != "foil"}),
        json.dumps(record | {"colour": "red"}),
        good,
        json.dumps(record | {"id": "q", "spans": {"value": [0, 1]}}),
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(PairError) as error:
        read_pairs(path)
    problems = str(error.value).splitlines()
    assert [problem.split(":")[1] for problem in problems] == ["3", "4", "5", "6", "7", "8"]
    assert "not JSON" in problems[0]
    assert "expected one JSON object" in problems[1]
    assert "expected the field(s) foil" in problems[2]
    assert "found also colour" in problems[3]
    assert "found 'p' of line 1 again" in problems[4]
    assert "difference at character 6" in problems[5]


def test_files_are_written_and_read(tmp_path):
    pairs = [pair(), replace(pair(), id="q")]
    path = tmp_path / "deep" / "pairs.jsonl"
    write_pairs(pairs, path)
    assert read_pairs(path) == pairs
    assert [p.name for p in path.parent.iterdir()] == ["pairs.jsonl"]


def test_an_empty_file_and_bytes_that_are_no_text_are_named(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n")
    with pytest.raises(PairError, match="expected at least one pair, found none"):
        read_pairs(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(PairError, match="expected UTF-8"):
        read_pairs(path)


def test_the_command_writes_what_the_function_gives_and_proves_it(tmp_path, capsys):
    path = tmp_path / "pairs.jsonl"
    assert main(["--count", "3", "--seed", "5", "--kind", "dose", "--kind", "future_uses", "--out", str(path)]) == 0
    assert read_pairs(path) == [p for kind in ("dose", "future_uses") for p in generate_pairs(3, 5, kind=kind)]
    assert main(["--prove", str(path)]) == 0
    assert "6 pairs, all as the environment gives them" in capsys.readouterr().out


def test_the_command_says_what_is_wrong_in_one_line(tmp_path, capsys):
    path = tmp_path / "pairs.jsonl"
    path.write_text("{}")
    assert main(["--prove", str(path), "--quiet"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {path}:1: expected the field(s)")
    assert error.count("\n") == 1
    assert main(["--prove", str(tmp_path / "none.jsonl"), "--quiet"]) == 2
    with pytest.raises(SystemExit) as exit_:
        main([])
    assert exit_.value.code == 2
