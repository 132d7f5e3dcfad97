"""What the Ray engine sends to a worker, and the worker (`interp.ray_engine` says what for)."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import io
import pickle
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FunctionType, MappingProxyType
from typing import Any

import pandas as pd
import ray
import torch
from ray.cloudpickle import CloudPickler

from interp import cli
from interp.base_models import BUILT_IN
from interp.engines import RAY, Measure
from interp.subject import Subject


@dataclass(frozen=True)
class Recipe:
    """How a worker loads the subject, and what it must find then.

    Attributes:
        adapter: the folder.
        base, device, dtype, load_in_4bit: as for `Subject.load`.
        threads: of a worker.
        adapter_sha256, base_sha256, versions: as `run.json` records them; versions are (package, version).
    """

    adapter: str
    base: str | None
    device: str
    dtype: str
    load_in_4bit: bool
    threads: int
    adapter_sha256: str
    base_sha256: str | None
    versions: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, args: argparse.Namespace, setting: Mapping[str, Any]) -> Recipe:
        """The recipe for the subject of a run.

        Raises:
            InputError: if the device is none that Ray can hand out.
        """
        if args.device not in ("cpu", "cuda"):
            raise cli.InputError(f"--device: expected cpu or cuda with --engine {RAY}, found {args.device!r}")
        (adapter,) = (folder for folder in cli.adapter_folders(args) if folder.name == setting["adapter"]["name"])
        name = setting["base"]["name"]
        path = Path(name).expanduser()
        base = str(path.resolve()) if name != BUILT_IN and path.exists() else args.base
        return cls(
            str(adapter), base, args.device, args.dtype, args.load_in_4bit, torch.get_num_threads(),
            setting["adapter"]["sha256"], setting["base"]["sha256"], tuple(setting["versions"].items()),
        )  # fmt: skip


@dataclass(frozen=True)
class Refusal:
    """An error that the user can mend, as text: not every exception survives being pickled."""

    message: str


class Worker:
    """One process of the cluster, an actor: a subject, and the function that it was last asked for."""

    def load(self, recipe: Recipe) -> Refusal | None:
        """Load the subject and compare it with the driver's."""
        torch.set_num_threads(recipe.threads)
        given = asdict(recipe)
        options = {name: given[name] for name in ("base", "device", "dtype", "load_in_4bit")}
        try:
            self.subject = Subject.load(recipe.adapter, **options)
        except cli.KNOWN_ERRORS as error:
            return Refusal(f"worker on {platform.node()}: {error}")
        found = {
            "adapter": self.subject.adapter_sha256,
            "base": self.subject.base_identity["sha256"],
            **{package: importlib.metadata.version(package) for package, _ in recipe.versions},
        }
        expected = {"adapter": recipe.adapter_sha256, "base": recipe.base_sha256, **dict(recipe.versions)}
        for name, value in expected.items():
            if found[name] != value:
                return Refusal(f"worker on {platform.node()}: {name}: expected {value}, found {found[name]}")
        self._work: tuple[Any, Measure] | None = None
        return None

    def measure(self, work: list[Any], item: bytes) -> pd.DataFrame | Refusal:
        """The frame of one item. `work` holds the reference of the pickled function, which is fetched once."""
        (reference,) = work
        if self._work is None or self._work[0] != reference:
            self._work = reference, loads(ray.get(reference), self.subject)
        try:
            return self._work[1](loads(item, self.subject))
        except cli.KNOWN_ERRORS as error:
            return Refusal(str(error))


class _Pickler(CloudPickler):
    """Puts a mark in the place of the subject, and writes what a command defines by the name of its module.

    A command is run as `__main__`, whose functions and classes cannot be found there by another process.
    """

    def persistent_id(self, value: Any) -> str | None:
        return "subject" if isinstance(value, Subject) else None

    def reducer_override(self, value: Any) -> Any:
        if type(value) is MappingProxyType:
            return MappingProxyType, (dict(value),)
        main = sys.modules["__main__"]
        name = value.__name__ if isinstance(value, FunctionType) or type(value) is type else None
        if name and main.__spec__ and vars(main).get(name) is value and value.__module__ == "__main__":
            return _named, (main.__spec__.name, name)
        return super().reducer_override(value)


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, subject: Subject) -> None:
        super().__init__(io.BytesIO(data))
        self._subject = subject

    def persistent_load(self, mark: str) -> Subject:
        return self._subject


def dumps(value: Any) -> bytes:
    """Pickle a function or an item without the subject in it."""
    data = io.BytesIO()
    _Pickler(data).dump(value)
    return data.getvalue()


def loads(data: bytes, subject: Subject) -> Any:
    """What was pickled, with this subject in it."""
    return _Unpickler(data, subject).load()


def _named(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)
