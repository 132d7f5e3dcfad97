"""Everything at once on tiny random models: every folder, the verdict and the page; killed and continued; several."""

import json
import shlex

import pandas as pd
import pytest
from matplotlib.figure import Figure

from counterfactuals import Decision, write_decisions, write_pairs
from interp import knockout, patching, patching_growth, run_record
from interp.__main__ import Work, is_whole, main
from interp.base_models import resolve_base
from interp.report_texts import SECTIONS
from interp.run_record import PairPlan
from interp.subject import Subject
from interp.verdict import decide
from tests.interp.test_patching import make_pair
from tests.interp.tiny import save_adapter, tiny_pair_folders

GRAPHS = 6
AUDIT = {
    name: {"estimate": estimate, "low": estimate - 0.5, "high": estimate + 0.5}
    for name, estimate in (
        ("optimum", 11.0), ("optimum_without_retention", 10.4), ("retention", 0.6), ("heuristic", -4.0),
        ("best_constant", 6.7),
    )
}  # fmt: skip


def make_decision(number):
    user = f'{{"node":{number},"uses":{{"3":1,"{number}":2}}}}'
    spans = {}
    for key in ("3", str(number)):
        start = user.index(f'"{key}":') + 1
        spans |= {f"key:{key}": (start, start + len(key)), f"value:{key}": (start + len(key) + 2, start + len(key) + 3)}
    action = f'{{"retain": [{number}]}}'
    return Decision(
        id=f"d{number}",
        environment="test",
        group=f"g{number}",
        messages=({"role": "user", "content": user},),
        action=action,
        slots={"retain": (11, 14)},
        choices={"retain": ("[]", f"[{number}]")},
        spans=spans,
        labels={"planner_retains": {str(number): "pays"}},
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    adapter, base = tiny_pair_folders(tmp_path_factory.mktemp("tiny"))
    record = {"environment": "test", "base": resolve_base(adapter).identity(), "audit": AUDIT}
    (adapter / "workbench.json").write_text(json.dumps(record))
    return adapter, base


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    write_pairs([make_pair(n, group=f"g{n}") for n in range(GRAPHS)], folder / "pairs.jsonl")
    write_decisions([make_decision(n) for n in (5, 6)], folder / "decisions.jsonl")
    return folder


def command(files, out, *adapters, more=()):
    given = ["--pairs", str(files / "pairs.jsonl"), "--decisions", str(files / "decisions.jsonl")]
    return ["--adapter", *map(str, adapters), *given, "--out", str(out), "--control-pairs", "1", *more]


def read(path):
    return json.loads(path.read_text())


@pytest.fixture
def quick_figures(monkeypatch):
    """Figures are drawn, but a small one is saved in their place: rendering takes most of the time."""

    def save_small(figure, stem):
        stem.parent.mkdir(parents=True, exist_ok=True)
        for suffix in ("pdf", "png"):
            Figure(figsize=(1, 1), dpi=20).savefig(f"{stem}.{suffix}")

    for module in (run_record, patching_growth):
        monkeypatch.setattr(module, "save", save_small)


@pytest.fixture(scope="module")
def done(folders, files, tmp_path_factory):
    out = tmp_path_factory.mktemp("done")
    assert main(command(files, out, folders[0], more=["--quiet"])) == 0
    return out / "adapter"


def test_every_analysis_has_its_folder_and_the_verdict_follows_from_the_files(done):
    summaries = {}
    for name in SECTIONS:
        assert read(done / name / "run.json")["analysis"] == name
        assert {file.stem for file in (done / name).glob("*.png")} <= set(SECTIONS[name].figures)  # each has its words
        summaries[name] = read(done / name / "summary.json")
    verdict = read(done / "verdict.json")
    assert verdict == {"adapter": "adapter", **decide(summaries, AUDIT).to_json()}
    page = (done / "index.html").read_text()
    assert verdict["case"].capitalize() in page
    assert "http" not in page.replace("http-equiv", "")
    assert "<script" not in page


def test_each_run_record_is_a_command_that_gives_the_same_result(done, tmp_path, quick_figures):
    for module in (patching, knockout):
        name = module.__name__.removeprefix("interp.")
        command = read(done / name / "run.json")["command"].split()
        assert command[:3] == ["python", "-m", f"interp.{name}"]
        argv = [*command[3 : command.index("--out")], "--out", str(tmp_path)]
        argv += command[command.index("--out") + 2 :]
        assert module.main([*argv, "--quiet"]) == 0
        again, first = (pd.read_parquet(f / name / "results.parquet") for f in (tmp_path / "adapter", done))
        pd.testing.assert_frame_equal(again, first)


def test_a_killed_run_is_continued_and_gives_the_same(
    folders, files, done, tmp_path, monkeypatch, capsys, quick_figures
):
    whole = knockout.measure_pair
    measured = []

    def measure_some(subject, pair):
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(pair.id)
        return whole(subject, pair)

    monkeypatch.setattr(knockout, "measure_pair", measure_some)
    assert main(command(files, tmp_path, folders[0], more=["--quiet"])) == 130
    assert "--resume" in capsys.readouterr().err
    folder = tmp_path / "adapter"
    assert not (folder / "verdict.json").exists()
    monkeypatch.setattr(knockout, "measure_pair", whole)
    monkeypatch.setattr(patching, "measure_pair", None)  # it is whole: to measure again would fail
    assert main(command(files, tmp_path, folders[0], more=["--resume"])) == 0
    out = capsys.readouterr().out
    assert out.count("done before") == 4
    for name in SECTIONS:
        resumed, first = (pd.read_parquet(f / name / "results.parquet") for f in (folder, done))
        pd.testing.assert_frame_equal(resumed, first)
    assert read(folder / "verdict.json") == read(done / "verdict.json")


def test_other_pairs_or_options_are_never_taken_for_the_same(folders, done):
    subject = Subject.load(folders[0])
    pairs = [make_pair(n, group=f"g{n}") for n in range(GRAPHS)]

    def work(pairs):
        return Work(folders[0], folders[0], subject, PairPlan.make(subject.tokenizer, pairs), (), ())

    for name in SECTIONS:
        argv = shlex.split(read(done / name / "run.json")["command"])[3:]
        assert is_whole(done / name, name, argv, work(pairs))
        assert not is_whole(done / name, name, [*argv, "--seed", "1"], work(pairs))
        assert not is_whole(done / name, name, argv, work(pairs[1:]))
        assert not is_whole(done / "nothing", name, argv, work(pairs))


def test_the_page_alone_needs_no_model(folders, files, done, monkeypatch):
    before = (done / "index.html").read_text()
    (done / "index.html").unlink()
    monkeypatch.setattr("interp.subject.Subject.load", None)
    assert main(command(files, done.parent, folders[0], more=["--page-only", "--quiet"])) == 0
    assert (done / "index.html").read_text() == before


def test_several_adapters_are_compared(folders, files, tmp_path, capsys, quick_figures):
    other = save_adapter(tmp_path / "other", folders[1], seed=1)
    argv = command(files, tmp_path / "out", folders[0], other, more=["--limit", "2"])
    assert main(argv) == 0
    record = read(tmp_path / "out" / "adapter-other" / "comparison.json")
    assert [row["name"] for row in record["adapters"]] == ["adapter", "other"]
    for row in record["adapters"]:
        summary = read(tmp_path / "out" / row["name"] / "patching" / "summary.json")
        effect = summary["kinds"]["future_uses"]["models"]["trained"]["sweeps"]["denoise"]["effect"]
        assert row["effect_trained"] == effect
        parts = read(tmp_path / "out" / row["name"] / "lora_svd" / "summary.json")["parts"]
        assert row["size"] ** 2 == pytest.approx(sum(part["frobenius"] ** 2 for part in parts.values()))
    page = (tmp_path / "out" / "adapter-other" / "index.html").read_text()
    assert page.count("data:image/png") == 3
    assert '"../other/index.html"' in page
    assert "adapter-other" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("audit", "problem"),
    [
        ({**AUDIT, "retention": {"estimate": 1.0, "low": None, "high": 2.0}}, "audit.retention: expected an object"),
        ([], "audit: expected an object"),
    ],
)
def test_a_bad_audit_is_one_line_before_anything_is_measured(folders, files, tmp_path, capsys, audit, problem):
    bad = save_adapter(tmp_path / "adapter", folders[1])
    (bad / "workbench.json").write_text(json.dumps({"environment": "test", "audit": audit}))
    capsys.readouterr()  # what saving an adapter prints
    assert main(command(files, tmp_path / "out", bad)) == 2
    assert not (tmp_path / "out").exists()
    captured = capsys.readouterr()
    assert problem in captured.err
    assert captured.err.count("\n") == 1


def test_without_results_there_is_no_page(folders, files, tmp_path, capsys):
    assert main(command(files, tmp_path, folders[0], more=["--page-only"])) == 2
    assert "expected the results of at least one analysis" in capsys.readouterr().err
