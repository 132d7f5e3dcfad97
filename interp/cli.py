"""What the commands of `interp` share: options, pairs, progress, and how bad input is told from a bug."""

from __future__ import annotations

import argparse
import functools
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NoReturn, Protocol, TypeVar

import torch
from tqdm import tqdm

from counterfactuals import (
    CounterfactualPair,
    Decision,
    Episode,
    PairError,
    generate_decisions,
    generate_pairs,
    read_decisions,
    read_pairs,
    scheduler_episodes,
)
from interp.base_models import DTYPES, BaseModelError, read_json
from interp.engines import LOCAL, RAY, engine_name
from interp.memory_limit import limit_memory
from interp.shared_prefix import UnsupportedArchitecture
from interp.subject import Subject, SubjectError
from interp.tokens import AlignmentError, TokenizerError

T = TypeVar("T")
Progress = Callable[[Iterable[T]], Iterable[T]]

DEFAULT_COUNT = 32
DEFAULT_DECISIONS = 80
DONE, BAD_INPUT, INTERRUPTED = 0, 2, 130


class Main(Protocol):
    """A command: takes the arguments after its name, by default those of the process, and returns the exit status."""

    def __call__(self, argv: Sequence[str] | None = None) -> int: ...


class InputError(ValueError):
    """Something that the user gave cannot be used; the message is one line that says what and why."""


# A ValueError of any other class is a bug, and keeps its traceback.
KNOWN_ERRORS = (
    InputError,
    PairError,
    AlignmentError,
    TokenizerError,
    BaseModelError,
    SubjectError,
    UnsupportedArchitecture,
    OSError,
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (--help lists the options)")


def common_parser(analysis: str, description: str, *, example: str) -> argparse.ArgumentParser:
    """A parser with the options that all analyses share. `analysis` is the module's name, `patching`."""
    parser = _Parser(
        prog=f"python -m interp.{analysis}",
        description=description,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--adapter",
        type=Path,
        nargs="+",
        required=True,
        metavar="DIR",
        help="adapter folder(s), each analysed by itself",
    )
    add("--base", metavar="DIR|NAME", help="base model (default: what adapter_config.json names)")
    add("--pairs", type=Path, metavar="FILE", help="pair file, JSONL (default: generated with --seed)")
    add("--count", type=_positive, metavar="N", help=f"how many pairs to generate (default: {DEFAULT_COUNT})")
    add("--decisions", type=Path, metavar="FILE", help="decision file, JSONL, where an analysis uses ordinary states")
    add("--limit", type=_positive, metavar="N", help="use the first N pairs (and decisions) only")
    add("--device", default="cpu", help="cpu, cuda, cuda:N or mps (default: %(default)s)")
    add("--dtype", default="float32", choices=sorted(DTYPES), help="default: %(default)s")
    add("--load-in-4bit", action="store_true", help="quantise the base model (needs bitsandbytes)")
    add("--max-memory", type=_size, metavar="SIZE",
        help="of weights and patching sweeps, as 800MB or 2GB; longer passes are cut (default: no limit)")  # fmt: skip
    add("--threads", type=_positive, metavar="N", help="CPU threads (default: all cores; with --engine ray 1 a worker)")
    add("--engine", type=engine_name, default=LOCAL, metavar="{local,ray}",
        help="ray: share what is measured pair by pair over a Ray cluster, the one at RAY_ADDRESS or one started here; "
             "the rest is done by this process, which loads the model too (default: %(default)s)")  # fmt: skip
    add("--seed", type=_seed, default=0, help="of the generated pairs and of the resampling (default: %(default)s)")
    add("--out", type=Path, default=Path("reports"), metavar="DIR",
        help=f"results go to DIR/<adapter folder's name>/{analysis}/ (default: %(default)s)")  # fmt: skip
    add("--resume", action="store_true", help="continue an interrupted run; without it a run starts over")
    add("--quiet", action="store_true", help="no progress bar and no table")
    return parser


def command(main: Callable[[Sequence[str]], int]) -> Main:
    """A `main` that answers bad input with one line on stderr and exit status 2. A bug keeps its traceback."""

    @functools.wraps(main)
    def wrapped(argv: Sequence[str] | None = None) -> int:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # what libraries tell developers is not for users
                return main(sys.argv[1:] if argv is None else argv)
        except KNOWN_ERRORS as error:
            sys.stderr.write(f"error: {_one_line(error)}\n")
            return BAD_INPUT
        except KeyboardInterrupt:
            sys.stderr.write("interrupted; --resume continues from the pairs that are done\n")
            return INTERRUPTED

    return wrapped


def adapter_folders(args: argparse.Namespace) -> list[Path]:
    """The adapter folders, resolved, so that each has a name.

    Raises:
        InputError: if one is no folder, or two have the same name and would write to the same place.
    """
    folders = [folder.resolve() for folder in args.adapter]
    named: dict[str, Path] = {}
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"--adapter: expected a folder with a PEFT adapter, found {str(folder)!r}, which is none")
        if folder.name in named:
            raise InputError(
                f"--adapter: expected folders with different names, found {named[folder.name]} and {folder}, whose "
                f"results would go to the same place"
            )
        named[folder.name] = folder
    return folders


def load_pairs(args: argparse.Namespace, adapter: Path) -> list[CounterfactualPair]:
    """The pairs of a file, or generated ones in the words that the adapter was trained with.

    An adapter trained by this project has a `workbench.json` that says in which environment, under which rules and with
    which system prompt; another adapter gets the generator's defaults.

    Raises:
        InputError: if both a file and a count are given, or the adapter's environment has no generator.
        PairError, OSError: if the file cannot be used.
    """
    if args.pairs is not None:
        if args.count is not None:
            raise InputError("--count: expected not to be given together with --pairs; --limit uses fewer of a file")
        pairs = read_pairs(args.pairs)
    else:
        pairs = _generated(generate_pairs, args.count or DEFAULT_COUNT, args.seed, adapter, "--pairs")
    return pairs[: args.limit]


def load_episodes(args: argparse.Namespace, adapter: Path, count: int) -> list[Episode]:
    """Episodes to play, on random graphs that the adapter was not trained on, as `load_pairs` generates pairs.

    The graphs that it was trained on are those of its `graphs.txt`, one fingerprint a line, where it has one.

    Raises:
        InputError: if the adapter's environment has no episodes, or its setting is refused.
    """
    file, seen = adapter / "workbench.json", adapter / "graphs.txt"
    setting = _training_setting(file) if file.exists() else {}
    known = seen.read_text(encoding="utf-8").split() if seen.exists() else []
    try:
        return scheduler_episodes(count, args.seed, seen=frozenset(known), **setting)
    except PairError as error:
        raise InputError(f"{file}: {error}") from error


def load_decisions(args: argparse.Namespace, adapter: Path) -> list[Decision]:
    """The ordinary states of a file, or generated ones, `DEFAULT_DECISIONS` of them, as for `load_pairs`.

    Raises:
        InputError: if the adapter's environment has no generator.
        PairError, OSError: if the file cannot be used.
    """
    if args.decisions is not None:
        decisions = read_decisions(args.decisions)
    else:
        decisions = _generated(generate_decisions, DEFAULT_DECISIONS, args.seed, adapter, "--decisions")
    return decisions[: args.limit]


def generate_kind(args: argparse.Namespace, adapter: Path, kind: str, count: int) -> list[CounterfactualPair]:
    """Generated pairs of a control kind, in the setting of the adapter, whatever --pairs and --limit say.

    Raises:
        InputError: if the adapter's environment has no generator.
    """
    return _generated(functools.partial(generate_pairs, kind=kind), count, args.seed, adapter, "--pairs")


def series_name(folders: Sequence[Path], args: argparse.Namespace) -> str:
    """What a comparison of several adapters is called: --series, or the first and the last one, `ep050-ep400`."""
    given: str | None = getattr(args, "series", None)
    return given or f"{folders[0].name}-{folders[-1].name}"


def load_subject(args: argparse.Namespace, adapter: Path) -> Subject:
    """The adapter on its base, with the device and the precision asked for."""
    threads = args.threads or (1 if args.engine == RAY else None)
    if threads is not None:
        torch.set_num_threads(threads)
    if args.max_memory is not None and args.engine == RAY:
        raise InputError("--max-memory: expected --engine local, found ray, whose workers have no such limit")
    subject = Subject.load(adapter, args.base, device=args.device, dtype=args.dtype, load_in_4bit=args.load_in_4bit)
    if args.max_memory is not None:
        limit_memory(subject, args.max_memory)
    return subject


def progress_bar(args: argparse.Namespace, label: str, unit: str = "pair") -> Progress:
    """Wraps an iterable in a progress bar on stderr, or in nothing with --quiet."""

    def wrap(items: Iterable[T]) -> Iterable[T]:
        return tqdm(items, desc=label, unit=unit, file=sys.stderr, disable=args.quiet)

    return wrap


def say(args: argparse.Namespace, text: str) -> None:
    """Print to stdout, unless --quiet."""
    if not args.quiet:
        sys.stdout.write(text + "\n")


def _generated(generate: Callable[..., list[T]], count: int, seed: int, adapter: Path, option: str) -> list[T]:
    """What a generator makes in the setting of the adapter's training run; `option` names a file to use instead."""
    file = adapter / "workbench.json"
    setting = _training_setting(file, option) if file.exists() else {}
    try:
        return generate(count, seed, **setting)
    except PairError as error:  # a setting that the generator refuses
        raise InputError(f"{file}: {error}; {option} gives {option[2:]} made in another way") from error


def _training_setting(file: Path, option: str = "--pairs") -> dict[str, str]:
    """Keyword arguments for the generators: the `rules`, `system` and `hardware` that `workbench.json` records."""
    record = read_json(file, "the record of a training run")
    if (environment := record.get("environment")) != "scheduler":
        raise InputError(
            f"{file}: environment: expected 'scheduler', found {environment!r}; {option} gives {option[2:]} of another"
        )
    setting = {name: record[name] for name in ("rules", "system", "hardware") if record.get(name) is not None}
    for name, value in setting.items():
        if not isinstance(value, str):
            raise InputError(f"{file}: {name}: expected a string, found {value!r}")
    return setting


def _positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, found {text!r}")
    return number


def _size(text: str) -> int:
    found = re.fullmatch(r"(\d{1,15}(?:\.\d+)?) *([KMGT]?)(I?)B", text.strip().upper(), re.ASCII)
    number, prefix, binary = found.groups() if found else ("0", "", "")
    size = int(float(number) * (1024 if binary else 1000) ** " KMGT".index(prefix or " "))
    if size < 1:
        raise argparse.ArgumentTypeError(f"expected a size as 800MB, 2GB or 1.5GiB, found {text!r}")
    return size


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number from 0, found {text!r}")
    return int(text)


def _one_line(error: BaseException) -> str:
    """The first line of a message, and how many more there are."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[0] if len(lines) == 1 else f"{lines[0]} (and {len(lines) - 1} more)"
