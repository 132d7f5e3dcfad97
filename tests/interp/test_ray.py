"""The Ray engine on two local workers: the frames of a local run to the bit, whatever happens to a worker."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys

import pandas as pd
import pytest

from counterfactuals import scheduler_episodes, write_decisions, write_pairs
from interp import cli, engines, knockout, logit_lens, lora_svd, patching, retention_heads
from interp.run_record import RunFolder
from interp.subject import Subject
from interp.tokens import encode_pairs
from tests.interp.test_main import make_decision
from tests.interp.test_patching import interrupt_after, make_pair
from tests.interp.tiny import tiny_pair_folders

ray = pytest.importorskip("ray")
ray_engine = pytest.importorskip("interp.ray_engine")
ray_worker = pytest.importorskip("interp.ray_worker")
pytestmark = pytest.mark.slow
PAIRS = 4


@pytest.fixture(scope="module")
def cluster():
    """Two places for workers, who are kept from test to test, on a cluster of this process."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patched.delenv("RAY_ADDRESS", raising=False)
        context = ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        yield context.address_info["gcs_address"]
        ray_engine.close()
        ray.shutdown()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tiny_pair_folders(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def subject(folders):
    return Subject.load(folders[0])


@pytest.fixture(scope="module")
def encoded(subject):
    return encode_pairs(subject.tokenizer, [make_pair(n) for n in range(PAIRS)])[0]


@pytest.fixture(scope="module")
def argv(folders, tmp_path_factory):
    file = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    write_pairs([make_pair(n) for n in range(PAIRS)], file)

    def make(out, *more):
        common = ["--pairs", str(file), "--quiet", "--control-pairs", "1", "--threads", "1", "--out", str(out)]
        return ["--adapter", str(folders[0]), *common, *more]

    return make


@pytest.fixture(scope="module", autouse=True)
def no_figures():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(patching, "figures", lambda frame, seed: {})
        yield


@pytest.fixture(scope="module")
def local(argv, no_figures, tmp_path_factory):
    """The folder of a local run."""
    out = tmp_path_factory.mktemp("local")
    assert patching.main(argv(out)) == 0
    return out / "adapter" / "patching"


@pytest.fixture
def parser():
    made = cli.common_parser("patching", "", example="")
    patching.add_options(made)
    return made


@pytest.fixture
def run(argv, parser, subject, tmp_path, cluster):
    """A folder to be filled by the Ray engine."""
    args = parser.parse_args(argv(tmp_path, "--engine", "ray"))
    return RunFolder.open("patching", args, [], subject)


def assert_same(folder, other):
    one, two = (pd.read_parquet(place / "results.parquet") for place in (folder, other))
    pd.testing.assert_frame_equal(one, two, check_exact=True)
    names = [{path.name for path in (place / "results.partial").iterdir()} for place in (folder, other)]
    assert names[0] == names[1]


def read(path):
    return json.loads(path.read_text())


def test_the_frames_are_those_of_a_local_run_to_the_bit(cluster, argv, local, tmp_path):
    assert patching.main(argv(tmp_path, "--engine", "ray")) == 0
    folder = tmp_path / "adapter" / "patching"
    assert_same(folder, local)
    assert read(folder / "summary.json") == read(local / "summary.json")
    record, before = read(folder / "run.json"), read(local / "run.json")
    assert (before["engine"], record["engine"]) == ({"name": "local"}, {"name": "ray", "workers": 2})
    assert record["threads"] == before["threads"] == 1


def test_an_error_is_not_tried_again_and_is_one_line(argv, tmp_path, cluster, monkeypatch, capsys):
    def refuse(subject, pair):
        (tmp_path / f"{pair.id}.{os.getpid()}").touch()
        raise cli.PairError(f"{pair.id}: expected sense, found none")

    monkeypatch.setattr(patching, "measure_pair", refuse)
    assert patching.main(argv(tmp_path / "out", "--limit", "1", "--engine", "ray")) == 2
    assert capsys.readouterr() == ("", "error: p0: expected sense, found none\n")
    assert len(list(tmp_path.glob("p0.*"))) == 1


def test_a_bug_keeps_its_class_and_its_place(run, encoded):
    def divide(pair):
        return 1 / 0

    with pytest.raises(ZeroDivisionError, match="in divide"):
        run.collect(encoded[:1], divide, iter)


def test_each_engine_goes_on_with_what_the_other_has_measured(argv, local, tmp_path, cluster, monkeypatch):
    with monkeypatch.context() as patched:
        interrupt_after(patched, 2)
        assert patching.main(argv(tmp_path)) == 130
    partial = tmp_path / "adapter" / "patching" / "results.partial"
    kept = {path: path.stat().st_mtime_ns for path in partial.glob("*.parquet")}
    assert len(kept) == 2
    assert patching.main(argv(tmp_path, "--engine", "ray", "--resume")) == 0
    assert all(path.stat().st_mtime_ns == before for path, before in kept.items())
    assert_same(tmp_path / "adapter" / "patching", local)

    interrupt_after(monkeypatch, 0)
    assert patching.main(argv(tmp_path, "--resume")) == 0  # nothing is left to measure
    assert_same(tmp_path / "adapter" / "patching", local)


def test_a_worker_killed_in_the_middle_loses_nothing(run, subject, encoded, tmp_path):
    def measure_and_die(pair):
        """The first worker that comes to its second pair is killed with the frame in its hands."""
        mine = f"{os.getpid()}"
        (tmp_path / f"{pair.id}.{mine}").touch()
        frame = patching.measure_pair(subject, pair)
        if len(list(tmp_path.glob(f"p*.{mine}"))) == 2:
            with contextlib.suppress(FileExistsError), (tmp_path / "killed").open("x") as file:
                file.write(mine)
                file.flush()
                os.kill(os.getpid(), signal.SIGKILL)
        return frame

    found = run.collect(encoded, measure_and_die, iter)
    pd.testing.assert_frame_equal(found, patching.measure(subject, encoded), check_exact=True)
    workers = [[path.suffix[1:] for path in tmp_path.glob(f"{pair.id}.*")] for pair in encoded]
    (again,) = [names for names in workers if len(names) > 1]
    assert (tmp_path / "killed").read_text() in again
    assert sorted(map(len, workers)) == [1] * (PAIRS - 1) + [2]


def test_a_pair_that_kills_its_workers_is_given_up(run, encoded, monkeypatch):
    monkeypatch.setattr(ray_engine, "ATTEMPTS", 1)

    def kill(pair):
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(cli.InputError, match="measuring one pair cost 1 workers") as caught:
        run.collect(encoded[:1], kill, iter)
    assert "\n" not in str(caught.value)


def test_a_worker_that_finds_another_adapter_says_so(run, encoded):
    run.engine.setting = run.setting | {"adapter": {"name": "adapter", "sha256": "0" * 64}}
    with pytest.raises(cli.InputError, match=f"worker on .*: adapter: expected {'0' * 64}, found "):
        run.collect(encoded[:1], lambda pair: None, iter)


def test_more_threads_than_a_machine_has_are_refused(run, encoded, monkeypatch):
    monkeypatch.setattr("torch.get_num_threads", lambda: 3)
    with pytest.raises(cli.InputError, match="expected a machine with 3 CPUs in the cluster, found none"):
        run.collect(encoded, lambda pair: None, iter)


@pytest.mark.parametrize("device", ["cuda:1", "mps"])
def test_a_device_that_ray_cannot_hand_out_is_refused(argv, parser, device):
    engine = engines.make(parser.parse_args(argv("out", "--engine", "ray", "--device", device)), {})
    with pytest.raises(cli.InputError, match=f"--device: expected cpu or cuda with --engine ray, found '{device}'"):
        engine.measure(len, [[]])


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("ray://here:10001", "expected host:port of a cluster that this machine is in, found 'ray://here:10001'"),
        ("here", "expected host:port of a cluster that this machine is in, found 'here'"),
        ("127.0.0.1:1", "expected a Ray cluster at 127.0.0.1:1, found .*refused"),
    ],
)
def test_an_address_without_a_cluster_is_refused(monkeypatch, address, problem):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(cli.InputError, match=f"^RAY_ADDRESS: {problem}"):
        ray_engine.connect(None)


def test_what_a_crashed_cluster_left_behind_is_not_waited_for(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray_engine, "read_ray_address", lambda: "127.0.0.1:1")
    assert ray_engine._running_cluster() is None
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(ray_engine, "read_ray_address", lambda: address)
        assert ray_engine._running_cluster() == address


@pytest.mark.parametrize("analysis", [knockout, logit_lens, lora_svd, patching, retention_heads])
def test_what_any_analysis_measures_can_be_sent_to_another_subject(analysis, folders, argv, tmp_path, monkeypatch):
    """Without a cluster: all that is measured is measured twice, by a subject that was loaded apart from the first."""
    other, sent = Subject.load(folders[0]), []

    class There(engines.Local):
        def measure(self, function, items):
            far = ray_worker.loads(ray_worker.dumps(function), other)
            for index, frame in super().measure(function, items):
                item = ray_worker.loads(ray_worker.dumps(items[index]), other)
                assert item == items[index]
                pd.testing.assert_frame_equal(far(item), frame, check_exact=True)
                sent.append(item)
                yield index, frame

    monkeypatch.setattr(engines, "make", lambda args, setting: There())
    monkeypatch.setattr("interp.run_record.save", lambda figure, stem: None)
    write_decisions([make_decision(5)], tmp_path / "decisions.jsonl")
    given = argv(tmp_path, "--decisions", str(tmp_path / "decisions.jsonl"))
    if analysis is not patching:
        at = given.index("--control-pairs")
        del given[at : at + 2]
    assert analysis.main(given) == 0
    assert {item.id for item in sent} >= {f"p{n}" for n in range(PAIRS)}


def test_a_mark_stands_for_the_subject_and_episodes_travel_whole(subject):
    assert ray_worker.loads(ray_worker.dumps([subject, subject.base]), subject) == [subject, subject.base]
    assert len(ray_worker.dumps(subject)) < 50
    episodes = scheduler_episodes(2, 0)
    assert ray_worker.loads(ray_worker.dumps(episodes), subject) == episodes


@pytest.mark.parametrize(
    ("name", "problem"),
    [("ray", "pip install 'scheduler-interp[cluster]'), found no package"), ("dask", "found 'dask'")],
)
def test_an_engine_that_is_not_there_is_one_line(monkeypatch, capsys, name, problem):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert patching.main(["--adapter", "nowhere", "--engine", name]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert problem in err


def test_a_command_is_found_by_the_workers(cluster, argv, local, tmp_path):
    """What a command defines is in `__main__` there, and the process joins a cluster that it did not start."""
    ray_engine.close()  # or else the command would wait for their places
    shutil.copytree(local.parent.parent, tmp_path, dirs_exist_ok=True)
    partial = tmp_path / "adapter" / "patching" / "results.partial"
    min(partial.glob("*.parquet")).unlink()
    command = [sys.executable, "-m", "interp.patching", *argv(tmp_path, "--engine", "ray", "--resume")]
    command.remove("--quiet")
    where = os.environ | {"RAY_ADDRESS": cluster}
    done = subprocess.run(command, env=where, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"Ray cluster at {cluster}: 2 CPUs, 0 GPUs\n")
    assert read(partial.parent / "run.json")["engine"] == {"name": "ray", "workers": 1}
    assert_same(tmp_path / "adapter" / "patching", local)
