"""Options, bad input in one line, and pairs from a file or in the words of the training run."""

import argparse
import json
from pathlib import Path

import pytest

from counterfactuals import CounterfactualPair, PairError, write_pairs
from interp import cli


def parse(*argv):
    return cli.common_parser("patching", "Activation patching.", example="example").parse_args(list(argv))


def make_pair(number):
    def says(value):
        return ({"role": "user", "content": f'{{"3":{value}}}'},)

    return CounterfactualPair(
        f"p{number}", "test", "k", says(1), says(0), '{"retain": ', "[3]}", "[]}", {"value": (5, 6)}, f"g{number}"
    )


def run(error):
    @cli.command
    def main(argv):
        raise error

    return main([])


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        ([], "--adapter"),
        (["--adapter", "a", "--count", "0"], "above 0, found '0'"),
        (["--adapter", "a", "--limit", "-3"], "--limit"),
        (["--adapter", "a", "--count", "two"], "found 'two'"),
        (["--adapter", "a", "--dtype", "int8"], "--dtype"),
        (["--adapter", "a", "--seed", "x"], "--seed"),
        (["--adapter", "a", "--colour"], "--colour"),
    ],
)
def test_wrong_options_are_told_in_one_line(argv, problem, capsys):
    main = cli.command(lambda argv: parse(*argv) and 0)
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert problem in err
    assert err.count("\n") == 1


def test_help_shows_the_options_and_an_example(capsys):
    with pytest.raises(SystemExit) as caught:
        parse("--help")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for option in ("--adapter", "--base", "--pairs", "--limit", "--device", "--dtype", "--load-in-4bit", "--resume",
                   "--seed", "--out", "--quiet", "example:"):  # fmt: skip
        assert option in text


def test_options_have_the_documented_defaults():
    args = parse("--adapter", "ckpt/ep400")
    assert (args.adapter, args.out, args.seed, args.device, args.dtype) == (
        [Path("ckpt/ep400")], Path("reports"), 0, "cpu", "float32",
    )  # fmt: skip
    assert (args.base, args.pairs, args.limit, args.resume, args.quiet) == (None, None, None, False, False)
    assert len(parse("--adapter", "a", "b", "c").adapter) == 3


@pytest.mark.parametrize(
    "error", [cli.InputError("what is wrong"), FileNotFoundError(2, "No such file", "what is wrong"), *[
        kind("what is wrong") for kind in (cli.PairError, cli.BaseModelError, cli.SubjectError, cli.TokenizerError)
    ]]
)  # fmt: skip
def test_bad_input_is_one_line_and_status_2(error, capsys):
    assert run(error) == 2
    err = capsys.readouterr().err
    assert "what is wrong" in err
    assert err.count("\n") == 1


def test_a_message_of_many_lines_is_counted(capsys):
    assert run(cli.PairError("pairs.jsonl:1: a\npairs.jsonl:2: b\npairs.jsonl:3: c")) == 2
    assert capsys.readouterr().err == "error: pairs.jsonl:1: a (and 2 more)\n"


@pytest.mark.parametrize("error", [ValueError("a bug"), KeyError("a bug"), RuntimeError("a bug"), AssertionError()])
def test_a_bug_keeps_its_traceback(error):
    with pytest.raises(type(error)):
        run(error)


def test_an_interrupt_says_how_to_continue(capsys):
    assert run(KeyboardInterrupt()) == 130
    assert "--resume" in capsys.readouterr().err


def test_the_process_arguments_are_the_default(monkeypatch):
    seen = []
    monkeypatch.setattr("sys.argv", ["patching.py", "--adapter", "x"])
    assert cli.command(lambda argv: seen.extend(argv) or 0)() == 0
    assert seen == ["--adapter", "x"]


def test_adapter_folders_have_names_of_their_own(tmp_path, monkeypatch):
    for name in ("one/ep400", "two/ep400", "one/ep050"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "one/ep400")
    folders = cli.adapter_folders(argparse.Namespace(adapter=[Path(), Path("../ep050/")]))
    assert [folder.name for folder in folders] == ["ep400", "ep050"]
    with pytest.raises(cli.InputError, match="different names"):
        cli.adapter_folders(argparse.Namespace(adapter=[Path(), tmp_path / "two/ep400"]))
    with pytest.raises(cli.InputError, match="missing"):
        cli.adapter_folders(argparse.Namespace(adapter=[tmp_path / "missing"]))


def test_pairs_come_from_the_file_and_the_limit_takes_the_first(tmp_path):
    file = tmp_path / "pairs.jsonl"
    write_pairs([make_pair(n) for n in range(4)], file)
    assert [p.id for p in cli.load_pairs(parse("--adapter", "a", "--pairs", str(file)), tmp_path)] == [
        "p0",
        "p1",
        "p2",
        "p3",
    ]
    limited = cli.load_pairs(parse("--adapter", "a", "--pairs", str(file), "--limit", "2"), tmp_path)
    assert [p.id for p in limited] == ["p0", "p1"]
    with pytest.raises(cli.InputError, match="--count"):
        cli.load_pairs(parse("--adapter", "a", "--pairs", str(file), "--count", "2"), tmp_path)
    with pytest.raises(FileNotFoundError):
        cli.load_pairs(parse("--adapter", "a", "--pairs", str(tmp_path / "none.jsonl")), tmp_path)


def generator(monkeypatch):
    calls = []

    def generate_pairs(count, seed, **setting):
        calls.append((count, seed, setting))
        if setting.get("rules") == "upstream":
            raise PairError("rules: expected documented, found 'upstream'")
        return [make_pair(n) for n in range(count)]

    monkeypatch.setattr(cli, "generate_pairs", generate_pairs)
    return calls


def test_generated_pairs_follow_the_seed_and_the_training_run(tmp_path, monkeypatch):
    calls = generator(monkeypatch)
    assert len(cli.load_pairs(parse("--adapter", "a"), tmp_path)) == 32
    record = {"environment": "scheduler", "rules": "documented", "system": "Be brief.", "base": {"name": "x"}}
    (tmp_path / "workbench.json").write_text(json.dumps(record), encoding="utf-8")
    assert len(cli.load_pairs(parse("--adapter", "a", "--count", "5", "--seed", "7", "--limit", "3"), tmp_path)) == 3
    assert calls == [(32, 0, {}), (5, 7, {"rules": "documented", "system": "Be brief."})]


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"environment": "passes"}, "environment: expected 'scheduler', found 'passes'"),
        ({"environment": "scheduler", "system": 3}, "system: expected a string, found 3"),
        ({"environment": "scheduler", "rules": "upstream"}, "rules: expected documented"),
    ],
)
def test_a_training_run_that_no_pairs_can_be_generated_for_is_named(tmp_path, monkeypatch, record, problem):
    generator(monkeypatch)
    (tmp_path / "workbench.json").write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(cli.InputError) as caught:
        cli.load_pairs(parse("--adapter", "a"), tmp_path)
    assert problem in str(caught.value)
    assert "workbench.json" in str(caught.value)


def test_progress_goes_to_stderr_unless_quiet(capsys):
    assert list(cli.progress_bar(parse("--adapter", "a"), "patching")([1, 2])) == [1, 2]
    out, err = capsys.readouterr()
    assert (out, "patching" in err) == ("", True)
    quiet = parse("--adapter", "a", "--quiet")
    assert list(cli.progress_bar(quiet, "patching")([1, 2])) == [1, 2]
    cli.say(quiet, "a table")
    assert capsys.readouterr() == ("", "")
