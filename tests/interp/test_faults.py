"""What goes wrong around a run: it is killed, the disk is full, its files are broken, another run is there, Ctrl-C."""

import contextlib
import itertools
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path

import pandas as pd
import pytest
import torch

from interp import cli, gallery, patching, run_record
from interp.__main__ import conclude
from interp.attribution import gradients
from interp.knockout import measure_pair as knock_out
from interp.logit_lens import encode_texts, measure_text
from interp.lora_activations import measure_pair as measure_activations
from interp.pair_runs import PairRuns
from interp.patching import Task
from interp.patching_growth import write_growth
from interp.report_texts import SECTIONS
from interp.retention_measure import Measuring
from interp.retention_measure import measure_pair as measure_heads
from interp.run_record import PairPlan, RunFolder
from interp.subject import Subject
from interp.tokens import encode_pair
from tests.interp.test_patching import make_pair
from tests.interp.tiny import save_adapter, save_base

PAIRS, KILLS, KILLS_A_ROUND = 4, 50, 5
TIME_LIMIT = 120  # seconds, of a child: one that hangs is a failure, no hanging suite
NOT_RUN = "Not run: nothing is known of this here."


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """A forked child has none of its parent's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    base = save_base(folder / "base", num_hidden_layers=2)
    return save_adapter(folder / "adapter", base), base


@pytest.fixture(scope="module")
def subject(folders):
    return Subject.load(folders[0])


@pytest.fixture(scope="module")
def pair(subject):
    return encode_pair(subject.tokenizer, make_pair(2))


class Command:
    """A small command of an adapter, loaded already: measures each pair, keeps it, writes the folder as all do."""

    def __init__(self, subject, adapter):
        self.subject, self.adapter = subject, adapter
        self.plan = PairPlan.make(subject.tokenizer, [make_pair(number) for number in range(PAIRS)])

    def __call__(self, out, *more):
        return cli.command(self.run)(["--adapter", str(self.adapter), "--out", str(out), "--quiet", *more])

    def run(self, argv):
        args = cli.common_parser("small", "", example="").parse_args(argv)
        run = RunFolder.open("small", args, argv, self.subject)
        frame = run.collect(self.plan.encoded, self.measure, cli.progress_bar(args, "small"))
        run.finish(self.plan, frame, {"mean": frame["value"].mean()}, {})
        return cli.DONE

    def measure(self, pair):
        return measure_activations(self.subject, pair)


@pytest.fixture(scope="module")
def command(folders, subject):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(run_record, "_git", lambda: {"revision": None, "why": "not asked"})
        # Another user may not read the packages of this environment.
        versions = run_record._versions()
        patched.setattr(run_record, "_versions", lambda: versions)
        yield Command(subject, folders[0])


@pytest.fixture
def measured(command, monkeypatch):
    """The pairs that are measured from here on."""
    found = []
    monkeypatch.setattr(command, "measure", lambda pair, measure=command.measure: found.append(pair) or measure(pair))
    return found


@pytest.fixture(scope="module")
def whole(command, tmp_path_factory):
    """The folder of a run that nothing happened to."""
    out = tmp_path_factory.mktemp("whole")
    assert command(out) == cli.DONE
    return folder_of(out)


def folder_of(out):
    return out / "adapter" / "small"


def partial_of(out):
    return folder_of(out) / "results.partial"


def kept_in(folder):
    return {file.name: file for file in sorted((folder / "results.partial").glob("*.parquet"))}


def assert_same(file, other):
    pd.testing.assert_frame_equal(pd.read_parquet(file), pd.read_parquet(other), check_exact=True)


def assert_whole(folder, whole):
    """Every number is that of the other run, to the bit."""
    assert json.loads((folder / "run.json").read_text())["analysis"] == "small"
    for name in ("results.parquet", "tokens.parquet"):
        assert_same(folder / name, whole / name)
    for name in ("summary.json", "pairs.jsonl"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes()


def assert_nothing_half(folder, whole):
    """Each result that is kept is the whole result of its pair, and a folder that says it is whole is."""
    for name, file in kept_in(folder).items():
        assert_same(file, kept_in(whole)[name])
    if (folder / "run.json").exists():
        assert_whole(folder, whole)


class Child:
    """A forked process that does some work; its errors go to a pipe, which no limit on files stops."""

    def __init__(self, work):
        self.errors, errors = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(errors)
            return
        status = 70  # never left to the end of the block: a child must not return into the tests
        try:
            signal.alarm(TIME_LIMIT)
            sys.stderr = os.fdopen(errors, "w")
            status = work()
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):
                sys.stderr.flush()
            os._exit(status)

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)
        return self.wait()

    def wait(self):
        """(exit status, or minus the signal that ended it; what it wrote to stderr)"""
        with os.fdopen(self.errors) as text:
            written = text.read()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]), written


# -- killed


def test_killed_fifty_times_and_resumed_the_numbers_are_the_same(command, whole, tmp_path):
    began = time.monotonic()
    assert Child(lambda: command(tmp_path / "timed")).wait() == (cli.DONE, "")
    span = time.monotonic() - began
    moments, killed, rounds = random.Random(0), 0, 0
    while killed < KILLS:
        rounds += 1
        assert rounds < KILLS, "hardly any run was killed"
        for attempt in range(KILLS_A_ROUND):
            child = Child(lambda resume=attempt > 0: command(tmp_path, *["--resume"] * resume))
            time.sleep(moments.uniform(0, span))
            status, errors = child.kill()
            assert (status, errors) in ((-signal.SIGKILL, ""), (cli.DONE, ""))
            killed += status == -signal.SIGKILL
            assert_nothing_half(folder_of(tmp_path), whole)
        assert Child(lambda: command(tmp_path, "--resume")).wait() == (cli.DONE, "")
        assert_whole(folder_of(tmp_path), whole)


def sizes_of(folder):
    """Limits that stop a run in its first file, in a pair's, and in each that is written at the end."""
    setting = (folder / "results.partial" / "setting.json").stat().st_size
    kept = min(file.stat().st_size for file in kept_in(folder).values())
    results = (folder / "results.parquet").stat().st_size
    assert setting < kept < results
    return {"setting": setting // 2, "pair": (setting + kept) // 2, "results": results - 1}


def limited(command, limit, *, deadly=False):
    """A child in which no file can be longer than `limit` bytes: its writes fail in the middle, or kill it there."""

    def work(*argv):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL if deadly else signal.SIG_IGN)
        return command(*argv)

    return work


@pytest.mark.parametrize("where", ["setting", "pair", "results"])
def test_killed_in_the_middle_of_a_write(command, whole, tmp_path, where):
    deadly = limited(command, sizes_of(whole)[where], deadly=True)
    assert Child(lambda: deadly(tmp_path)).wait() == (-signal.SIGXFSZ, "")
    torn = [file for file in folder_of(tmp_path).rglob("*") if file.is_file() and file.stat().st_size]
    assert torn
    assert_nothing_half(folder_of(tmp_path), whole)
    assert len(kept_in(folder_of(tmp_path))) == (PAIRS if where == "results" else 0)
    assert not (folder_of(tmp_path) / "run.json").exists()
    assert command(tmp_path, "--resume") == cli.DONE
    assert_whole(folder_of(tmp_path), whole)


# -- a disk that is full or cannot be written


@pytest.mark.parametrize("where", ["setting", "pair", "results"])
def test_a_full_disk_is_one_line_and_what_was_measured_stays(command, whole, tmp_path, where):
    full = limited(command, sizes_of(whole)[where])
    status, errors = Child(lambda: full(tmp_path)).wait()
    assert status == cli.BAD_INPUT
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    assert "File too large" in errors
    assert str(folder_of(tmp_path)) in errors
    assert_nothing_half(folder_of(tmp_path), whole)
    assert len(kept_in(folder_of(tmp_path))) == (PAIRS if where == "results" else 0)
    assert not (folder_of(tmp_path) / "run.json").exists()
    assert command(tmp_path, "--resume") == cli.DONE
    assert_whole(folder_of(tmp_path), whole)


def test_a_disk_that_fills_half_way_keeps_the_pairs_before(command, whole, tmp_path, monkeypatch, measured):
    def fill_then_measure(pair, measure=command.measure):
        if len(kept_in(folder_of(tmp_path))) == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
        return measure(pair)

    with monkeypatch.context() as patched:
        patched.setattr(command, "measure", fill_then_measure)
        assert Child(lambda: command(tmp_path)).wait()[0] == cli.BAD_INPUT
    assert len(kept_in(folder_of(tmp_path))) == 3
    assert command(tmp_path, "--resume") == cli.DONE
    assert len(measured) == PAIRS - 3
    assert_whole(folder_of(tmp_path), whole)


def test_a_folder_that_cannot_be_written_is_one_line(command, tmp_path):
    def as_another_user():
        os.chdir(tmp_path)
        if os.geteuid() == 0:  # who may write everywhere
            os.seteuid(65534)
        return command(Path("reports"))

    tmp_path.chmod(0o555)
    try:
        status, errors = Child(as_another_user).wait()
    finally:
        tmp_path.chmod(0o755)
    assert (status, errors) == (cli.BAD_INPUT, "error: [Errno 13] Permission denied: 'reports'\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", [".", "adapter", "adapter/small", "adapter/small/results.partial"])
def test_a_file_where_a_folder_should_be_is_one_line(command, tmp_path, capsys, place):
    file = tmp_path / "reports" / place
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("mine")
    assert command(tmp_path / "reports") == cli.BAD_INPUT
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert str(file) in error
    assert file.read_text() == "mine"


# -- what is left of a run, broken


BROKEN = {
    "empty": lambda whole: b"",
    "truncated": lambda whole: whole[: len(whole) // 2],
    "without its end": lambda whole: whole[:-1],
    "other bytes": lambda whole: b"\xff\xfe" + whole,
}


@pytest.fixture
def interrupted(whole, tmp_path):
    """A copy of a run that ended before its results were written."""
    shutil.copytree(whole / "results.partial", partial_of(tmp_path))
    return tmp_path


def refused(command, out, capsys):
    assert command(out, "--resume") == cli.BAD_INPUT
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize("spoil", BROKEN.values(), ids=BROKEN)
def test_a_kept_result_that_is_broken_is_named_and_can_be_measured_again(
    command, whole, interrupted, measured, capsys, spoil
):
    file = list(kept_in(folder_of(interrupted)).values())[2]
    file.write_bytes(spoil(file.read_bytes()))
    error = refused(command, interrupted, capsys)
    assert str(file) in error
    assert "without this file --resume measures it again" in error
    assert not measured
    file.unlink()
    assert command(interrupted, "--resume") == cli.DONE
    assert len(measured) == 1
    assert_whole(folder_of(interrupted), whole)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"\xff{}", b"[]", b"[" * 100_000, b"{}", b'{"analysis": "small", "adapter": null}']
)
def test_a_broken_setting_is_named_and_a_run_without_resume_starts_over(command, whole, interrupted, capsys, text):
    file = partial_of(interrupted) / "setting.json"
    file.write_bytes(text)
    assert str(file) in refused(command, interrupted, capsys)
    assert command(interrupted) == cli.DONE
    assert_whole(folder_of(interrupted), whole)


def poison(folder):
    """Results of a run that is to be dropped: if one were used it would show."""
    for file in kept_in(folder).values():
        frame = pd.read_parquet(file)
        frame.assign(value=frame["value"] + 1).to_parquet(file, index=False)


def test_results_without_a_setting_belong_to_no_run(command, whole, interrupted):
    poison(folder_of(interrupted))
    (partial_of(interrupted) / "setting.json").unlink()
    assert command(interrupted, "--resume") == cli.DONE
    assert_whole(folder_of(interrupted), whole)


@pytest.mark.parametrize("count", range(1, PAIRS + 1))
def test_results_that_were_being_dropped_are_not_resumed(command, whole, interrupted, monkeypatch, count):
    poison(folder_of(interrupted))
    unlinked = []

    def unlink(self, missing_ok=False, unlink=Path.unlink):
        if len(unlinked) == count:
            raise KeyboardInterrupt
        unlinked.append(self)
        unlink(self, missing_ok)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", unlink)
        assert command(interrupted) == cli.INTERRUPTED
    assert command(interrupted, "--resume") == cli.DONE
    assert_whole(folder_of(interrupted), whole)


# -- two runs


def test_a_second_run_in_a_folder_is_refused_until_the_first_one_ends(command, whole, tmp_path, monkeypatch, capsys):
    waiting, ready = os.pipe()

    def wait_at_the_third(pair, measure=command.measure):
        if len(kept_in(folder_of(tmp_path))) == 2:
            os.write(ready, b"!")
            signal.pause()
        return measure(pair)

    with monkeypatch.context() as patched:
        patched.setattr(command, "measure", wait_at_the_third)
        first = Child(lambda: command(tmp_path))
    try:
        assert os.read(waiting, 1) == b"!"
        before = {file: file.stat().st_mtime_ns for file in folder_of(tmp_path).rglob("*")}
        for more in ([], ["--resume"]):
            assert command(tmp_path, *more) == cli.BAD_INPUT
            assert capsys.readouterr().err == (
                f"error: {folder_of(tmp_path)}: expected no other run in this folder, found one that is filling it\n"
            )
        assert {file: file.stat().st_mtime_ns for file in folder_of(tmp_path).rglob("*")} == before
    finally:
        assert first.kill() == (-signal.SIGKILL, "")
        os.close(waiting)
        os.close(ready)
    assert command(tmp_path, "--resume") == cli.DONE
    assert_whole(folder_of(tmp_path), whole)
    assert command(tmp_path) == cli.DONE


def test_a_process_that_goes_on_after_an_error_can_run_again(command, folders, subject, tmp_path):
    given = ["--adapter", str(folders[0]), "--out", str(tmp_path)]

    def open_folder(*more):
        args = cli.common_parser("small", "", example="").parse_args([*given, *more])
        return RunFolder.open("small", args, given, subject)

    def press(pair):
        raise KeyboardInterrupt

    first = open_folder()
    with pytest.raises(cli.InputError, match="found one that is filling it"):
        open_folder("--resume")
    with pytest.raises(KeyboardInterrupt):
        first.collect(command.plan.encoded, press, iter)
    second = open_folder("--resume")
    second.finish(None, pd.DataFrame({"value": [1.0]}), {}, {})
    (second.partial / "setting.json").write_text("{}")
    with pytest.raises(cli.InputError, match="expected small as in this run, found None") as refused:
        open_folder("--resume")
    open_folder()
    assert refused.traceback  # a notebook keeps it too, and with it all that its frames refer to


# -- Ctrl-C in a process that goes on


def thorough(subject, pair):
    return patching.measure_pair(subject, Task.of(pair, thorough=True))


def slopes(subject, pair):
    run = PairRuns.make(subject, pair).runs["trained", "baseline_a"]
    found = gradients(subject, run, pair.answer[0], pair.foil[0])
    return pd.concat([pd.DataFrame(t.flatten(0, -2).float().cpu().numpy()) for t in found.values()])


MEASURED = {
    "patching": thorough,
    "attribution": slopes,
    "retention heads": lambda subject, pair: measure_heads(Measuring(subject), pair),
    "logit lens": lambda subject, pair: measure_text(subject, encode_texts(subject.tokenizer, [pair], ())[0][0]),
    "knockout": knock_out,
    "activations": measure_activations,
}
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def state_of(subject):
    """What an analysis could leave changed: modes, hooks, replaced methods, switches, gradients, settings."""
    modules = {
        name: (
            type(module), module.training, *(len(getattr(module, kind)) for kind in HOOKS),
            getattr(module, "disable_adapters", None), str(getattr(module, "active_adapters", None)),
            sorted(set(vars(module)) - set(HOOKS)),
        )
        for name, module in subject.model.named_modules()
    }  # fmt: skip
    parameters = {name: (p.requires_grad, p.grad is None) for name, p in subject.model.named_parameters()}
    settings = subject.config._attn_implementation, torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return modules, parameters, settings


@contextlib.contextmanager
def interrupting(call):
    """Ctrl-C at this call of a module, counted from 0; yields the calls so far."""
    calls = []

    def press(module, args):
        calls.append(module)
        if len(calls) - 1 == call:
            raise KeyboardInterrupt

    handle = torch.nn.modules.module.register_module_forward_pre_hook(press)
    try:
        yield calls
    finally:
        handle.remove()


@pytest.mark.parametrize("measure", MEASURED.values(), ids=MEASURED)
def test_ctrl_c_leaves_the_model_as_it_was(subject, pair, measure):
    ids = torch.tensor([pair.ids_a])
    logits = subject.model(input_ids=ids).logits
    expected = measure(subject, pair)  # what is computed once is there
    with interrupting(-1) as calls:
        measure(subject, pair)
    before, moments = state_of(subject), random.Random(0)
    for call in {0, len(calls) - 1, *(moments.randrange(len(calls)) for _ in range(10))}:
        with pytest.raises(KeyboardInterrupt), interrupting(call):
            measure(subject, pair)
        assert state_of(subject) == before
        assert subject.is_trained
        assert torch.equal(subject.model(input_ids=ids).logits, logits)
    pd.testing.assert_frame_equal(measure(subject, pair), expected, check_exact=True)


# -- pages of what is there


SAVED = Path(__file__).parents[2] / "reports" / "imitation"
SUBSETS = [names for count in range(1, len(SECTIONS) + 1) for names in itertools.combinations(SECTIONS, count)]


def concluded(folder):
    args = cli.common_parser("small", "", example="").parse_args(["--adapter", "x", "--out", str(folder.parent)])
    args.quiet = True
    return cli.command(lambda argv: conclude(args, folder, None) and cli.DONE)([])


@pytest.mark.parametrize("names", SUBSETS, ids="+".join)
def test_the_page_of_some_analyses_says_which_were_not_run(tmp_path, names):
    for name in names:
        (tmp_path / name).symlink_to(SAVED / name)
    assert concluded(tmp_path) == cli.DONE
    page = (tmp_path / "index.html").read_text()
    assert page.count(NOT_RUN) == len(SECTIONS) - len(names)
    figures = sum((SAVED / name / f"{stem}.png").exists() for name in names for stem in SECTIONS[name].figures)
    assert page.count("data:image/png") == figures > 0
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert (verdict["case"] == json.loads((SAVED / "verdict.json").read_text())["case"]) == ("patching" in names)


@pytest.mark.parametrize("gone", ["*.png", "results.parquet", "tokens.parquet", "pairs.jsonl"])
def test_the_page_needs_records_only(tmp_path, gone):
    for name in SECTIONS:
        ignored = shutil.ignore_patterns(gone, "*.pdf", "*.partial")
        shutil.copytree(SAVED / name, tmp_path / name, ignore=ignored)
    assert concluded(tmp_path) == cli.DONE
    assert (tmp_path / "index.html").read_text().count("data:image/png") > 0 or gone == "*.png"


@pytest.mark.parametrize("left", ["summary.json", "results.parquet", "results.partial"])
def test_a_folder_without_its_record_is_no_analysis(tmp_path, capsys, left):
    (tmp_path / "patching").mkdir()
    (tmp_path / "patching" / left).write_text("{}")
    assert concluded(tmp_path) == cli.BAD_INPUT
    assert capsys.readouterr().err == (
        f"error: {tmp_path}: expected the results of at least one analysis, found none\n"
    )
    assert not (tmp_path / "index.html").exists()


@pytest.mark.parametrize("name", ["verdict.json", "patching/run.json", "patching/summary.json"])
@pytest.mark.parametrize("text", [b"", b'{"case": "cre', b"\xff", b"[]", b"[" * 100_000, None])
def test_a_broken_record_is_named_by_the_page_of_all_reports(tmp_path, capsys, name, text):
    file = tmp_path / "adapter" / name
    file.parent.mkdir(parents=True)
    (tmp_path / "adapter" / "verdict.json").write_text("{}")
    file.unlink(missing_ok=True)
    if text is None:
        file.mkdir()
    else:
        file.write_bytes(text)
    assert gallery.main(["--reports", str(tmp_path)]) == cli.BAD_INPUT
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert str(file) in error


@pytest.mark.parametrize("name", ["summary.json", "run.json"])
@pytest.mark.parametrize("text", [b"", b'{"statement": "tru', b"\xff", b"[]", b"[" * 100_000, None])
def test_a_broken_record_is_named_by_the_page_of_an_adapter(tmp_path, capsys, name, text):
    shutil.copytree(SAVED / "patching", tmp_path / "patching", ignore=shutil.ignore_patterns("*.partial"))
    file = tmp_path / "patching" / name
    file.unlink()
    if text is None:
        file.mkdir()
    else:
        file.write_bytes(text)
    assert concluded(tmp_path) == cli.BAD_INPUT
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert str(file) in error


@pytest.mark.parametrize("spoil", BROKEN.values(), ids=BROKEN)
def test_a_broken_table_is_named_by_the_comparison(tmp_path, capsys, spoil):
    file = tmp_path / "one" / "patching" / "results.parquet"
    file.parent.mkdir(parents=True)
    file.write_bytes(spoil((SAVED / "patching" / "results.parquet").read_bytes()))
    args = cli.common_parser("small", "", example="").parse_args(["--adapter", "one", "--out", str(tmp_path)])
    assert cli.command(lambda argv: write_growth(args, [Path("one")]) and cli.DONE)([]) == cli.BAD_INPUT
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert str(file) in error
