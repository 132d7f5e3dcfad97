"""What an imitation adapter does on graphs that it was never trained on, and what its base model does there."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from counterfactuals import generate_pairs
from env.training.samples import Sample, encode, episode_state
from interp.subject import Subject
from interp.tokens import EncodedPair, encode_pair

SEED_OFFSET = 1_000_000


def measure_held_out(
    adapter: Path,
    *,
    base: str,
    seed: int,
    seen: Collection[str],
    pairs: int = 100,
    states: int = 100,
    quiet: bool = False,
) -> dict[str, Any]:
    """Decisions on counterfactual pairs, for base and trained, and whole actions on ordinary states, for trained.

    Args:
        adapter: the adapter folder.
        base: its base model.
        seed: of the training run; the graphs here come from other seeds.
        seen: fingerprints of graphs that were trained on; what comes from them is left out.
        pairs, states: how many of each are made.
        quiet: no progress bar.

    Returns:
        By model: the share of A in which the answer's token is above the foil's, the share of B in which it is below,
        the mean logit difference in A and in B, and by how much it moves. For trained also the share of ordinary states
        in which greedy decoding gives the heuristic's whole action. Counts of what was used.
    """
    subject = Subject.load(adapter, base)
    unseen = [pair for pair in generate_pairs(pairs, seed + SEED_OFFSET) if pair.group not in seen]
    encoded = [encode_pair(subject.tokenizer, pair) for pair in unseen]
    result: dict[str, Any] = {"pairs": len(unseen), "graphs": len({pair.group for pair in unseen})}
    for name, switch in (("base", subject.base), ("trained", subject.trained)):
        with switch(), torch.inference_mode():
            rows = [_logit_differences(subject.model, pair) for pair in tqdm(encoded, f"pairs, {name}", disable=quiet)]
        a, b = np.array(rows).T
        result[name] = {
            "follows_in_a": float((a > 0).mean()),
            "follows_in_b": float((b < 0).mean()),
            "logit_difference_a": float(a.mean()),
            "logit_difference_b": float(b.mean()),
            "moves_by": float((a - b).mean()),
        }
    rng = np.random.default_rng([seed + SEED_OFFSET])
    episodes = [sample for sample in (episode_state(rng) for _ in range(states)) if sample.graph not in seen]
    with subject.trained(), torch.inference_mode():
        exact = [_is_exact(subject, sample) for sample in tqdm(episodes, "states, trained", disable=quiet)]
    result["trained"]["heuristic_action_exact"] = float(np.mean(exact))
    result["states"] = len(episodes)
    return result


def _logit_differences(model: Any, pair: EncodedPair) -> tuple[float, float]:
    """logit(answer) - logit(foil) at the decision, in A and in B."""
    logits = model(torch.tensor([pair.ids_a, pair.ids_b]), logits_to_keep=1).logits[:, -1]
    differences = logits[:, pair.answer[0]] - logits[:, pair.foil[0]]
    return differences[0].item(), differences[1].item()


def _is_exact(subject: Subject, sample: Sample) -> bool:
    """Whether every token of the action is the likeliest one, which is what greedy decoding would write."""
    row = encode(sample, subject.tokenizer)
    labels = torch.tensor(row["labels"])
    count = int((labels >= 0).sum())
    logits = subject.model(torch.tensor([row["input_ids"]]), logits_to_keep=count + 1).logits[0, :-1]
    return bool((logits.argmax(-1) == labels[-count:]).all())
