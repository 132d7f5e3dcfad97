"""The patching engine against TransformerLens, on the same pairs, in one process, with the same threads.

    python -m tests.benchmarks.sweep [--adapter DIR --pairs FILE] [--base DIR] [--rounds N] [--limit N] [--threads N]

Without an adapter: SmolLM2-135M-Instruct with a random one, and an observation of about 300 tokens in which one digit
differs some 50 tokens before the end. Compared is, for every layer, the trained model's logit difference between the
first tokens of answer and foil, with the residual stream patched at the value and at the decision, in both directions.
TransformerLens does it as its users do: `run_with_cache` with a filter for `resid_pre`, and its own patching function,
on the prompt alone. The engine's runs carry the answer's tokens as well and give its log-probability.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TQDM_DISABLE", "1")  # TransformerLens shows a bar for every sweep

import pandas as pd
import torch
from transformer_lens import patching

from counterfactuals import CounterfactualPair, read_pairs
from interp.base_models import BUILT_IN, find_base
from interp.subject import Subject
from interp.sweep import patch, run_pair
from interp.tokens import EncodedPair, encode_pairs
from tests.interp.tiny import save_adapter

Sweep = tuple[str, str]  # (position, direction)


@dataclasses.dataclass
class Job:
    """The default work on one pair and model: seconds of the caches and of each sweep, and what the sweeps found."""

    caches: float
    sweeps: dict[Sweep, float]
    found: dict[Sweep, torch.Tensor]  # (L,) logit differences

    def sweep(self, position: str) -> float:
        """Mean of the two directions."""
        return statistics.mean(seconds for (name, _), seconds in self.sweeps.items() if name == position)

    @property
    def total(self) -> float:
        return self.caches + sum(self.sweeps.values())


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def sweeps_of(pair: EncodedPair) -> Iterator[tuple[Sweep, int]]:
    places = {"value": pair.first_difference, "decision": pair.decision}
    for (name, position), direction in itertools.product(places.items(), ("denoising", "noising")):
        yield (name, direction), position


def engine_job(subject: Subject, pair: EncodedPair) -> Job:
    caches, (a, b) = timed(lambda: run_pair(subject, pair))
    job = Job(caches, {}, {})
    for sweep, position in sweeps_of(pair):
        recipient, donor = (b, a) if sweep[1] == "denoising" else (a, b)

        def work(recipient: Any = recipient, donor: Any = donor, position: int = position) -> torch.Tensor:
            return patch(subject, recipient, donor, [position]).logits

        job.sweeps[sweep], logits = timed(work)
        job.found[sweep] = (logits[:, pair.answer[0]] - logits[:, pair.foil[0]])[:-1]
    return job


@torch.inference_mode()
def transformer_lens_job(subject: Subject, pair: EncodedPair) -> Job:
    bridge = subject.bridge()
    prompts = [torch.tensor([ids]) for ids in (pair.ids_a, pair.ids_b)]

    def caches() -> list[Any]:
        wanted = {"names_filter": lambda name: name.endswith("hook_resid_pre")}
        return [bridge.run_with_cache(prompt, **wanted)[1] for prompt in prompts]

    seconds, (cache_a, cache_b) = timed(caches)
    job = Job(seconds, {}, {})
    for sweep, position in sweeps_of(pair):
        prompt, cache = (prompts[1], cache_a) if sweep[1] == "denoising" else (prompts[0], cache_b)

        def work(prompt: Any = prompt, cache: Any = cache, position: int = position) -> torch.Tensor:
            return patching.generic_activation_patch(
                bridge,
                prompt,
                cache,
                lambda logits: logits[0, -1, pair.answer[0]] - logits[0, -1, pair.foil[0]],
                patching.layer_pos_patch_setter,
                "resid_pre",
                index_df=pd.DataFrame({"layer": range(subject.n_layers), "pos": position}),
            )

        job.sweeps[sweep], job.found[sweep] = timed(work)
    return job


def made_up_pairs() -> list[CounterfactualPair]:
    """Observations of a scheduler's kind, with a count of 2 in A and of 0 in B."""
    pairs = []
    for number in range(2):
        nodes = [{"id": i, "op": "matmul", "inputs": [i - 1], "shape": [128, 64 + i + number]} for i in range(1, 8)]
        head = json.dumps({"nodes": nodes, "current_node": "7", "fast_mem": [4, 6]})[:-1] + ', "future_uses": {"7": '
        tail = '}, "capacity": 4096, "max_fusion": 4, "lookahead": [8]}'
        message_a, message_b = ([{"role": "user", "content": f"{head}{uses}{tail}"}] for uses in "20")
        pairs.append(
            CounterfactualPair(
                id=f"made up {number}",
                environment="scheduler",
                kind="future_uses",
                messages_a=tuple(message_a),
                messages_b=tuple(message_b),
                action_prefix='{"fuse_with_prev": true, "tile": 128, "retain": ',
                answer="[7]}",
                foil="[]}",
                spans={"value": (len(head), len(head) + 1)},
                group=str(number),
            )
        )
    return pairs


def report(jobs: list[tuple[EncodedPair, Job, Job]], threads: int) -> None:
    """Print sizes, the largest difference and the ratios, medians over pairs and rounds."""
    lengths = sorted({(len(pair.ids_a), len(pair.ids_a) - pair.first_difference) for pair, _, _ in jobs})
    print(f"tokens (prompt, from the value on): {lengths}; {threads} threads; {len(jobs)} jobs on each side")
    difference = max(
        float((ours.found[s] - theirs.found[s]).abs().max()) for _, ours, theirs in jobs for s in ours.found
    )
    print(f"largest difference of a logit difference, over all layers, positions and directions: {difference:.2g}")
    rows: dict[str, Callable[[Job], float]] = {
        "sweep alone, value position": lambda job: job.sweep("value"),
        "sweep alone, decision position": lambda job: job.sweep("decision"),
        "caches alone": lambda job: job.caches,
        "whole job: caches, two positions, two directions": lambda job: job.total,
    }
    print(f"{'':50}{'engine':>10}{'TransformerLens':>18}{'ratio':>8}")
    for label, measure in rows.items():
        ours = statistics.median(measure(job) for _, job, _ in jobs)
        theirs = statistics.median(measure(job) for _, _, job in jobs)
        print(f"{label:50}{ours:8.3f} s{theirs:16.2f} s{theirs / ours:8.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--adapter", type=Path, help="adapter folder (default: a random adapter on the built-in model)")
    parser.add_argument("--base", help="base model (default: what the adapter names)")
    parser.add_argument("--pairs", type=Path, help="pair file (default: pairs made up here)")
    parser.add_argument("--limit", type=int, default=2, help="pairs to use (default 2)")
    parser.add_argument("--rounds", type=int, default=3, help="jobs per pair and side (default 3)")
    parser.add_argument("--threads", type=int, default=2, help="threads of both sides (default 2)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        adapter, base = args.adapter, args.base
        if adapter is None:
            base = base or BUILT_IN
            adapter = save_adapter(folder, find_base(base).path, rank=16, alpha=32, size=0.02)
        subject = Subject.load(adapter, base)
    pairs = read_pairs(args.pairs) if args.pairs else made_up_pairs()
    encoded, left_out = encode_pairs(subject.tokenizer, pairs[: args.limit])
    for identifier, reason in left_out:
        print(f"left out: {identifier}: {reason}")
    first, _ = timed(lambda: engine_job(subject, encoded[0]))
    with torch.inference_mode():
        subject.bridge()(torch.tensor([encoded[0].ids_a]))
    print(f"first job of the engine, which compares itself with the model's own forward (not counted): {first:.2f} s")
    jobs = []
    for _ in range(args.rounds):
        for pair in encoded:
            jobs.append((pair, engine_job(subject, pair), transformer_lens_job(subject, pair)))
    report(jobs, args.threads)


if __name__ == "__main__":
    main()
