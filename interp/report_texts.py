"""The words of the page: what each analysis asks, and of each figure what it shows and what it does not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class FigureText:
    """What a figure shows, and what it does not."""

    shows: str
    does_not: str


@dataclass(frozen=True)
class Section:
    """An analysis on the page: its title, its question, and its figures by file name."""

    title: str
    question: str
    figures: Mapping[str, FigureText]


SECTIONS: Mapping[str, Section] = {
    "patching": Section(
        "At which layer the decision flips",
        "Activations of one observation are put into the run of the other, one layer and one place at a time. Where "
        "does the fact leave its own tokens, and where has it arrived at the token that decides?",
        {
            "patching": FigureText(
                "Share of the decision that is recovered by a patch at each layer, base and trained: at the value's "
                "tokens it falls where the fact has left them, at the decision it rises where the fact has arrived.",
                "It does not show how the fact is carried between the two, nor that one layer alone does it.",
            ),
            "components": FigureText(
                "By how many logits the decision moves when only what attention, or the MLP, or a single head adds to "
                "the stream is replaced.",
                "What one component brings need not add up to the whole: components can stand in for one another.",
            ),
            "controls": FigureText(
                "The same patches where they should move nothing, or should not matter, and the decision against the "
                "number itself: a step after 0 is a reading of zero against any, a slope is a reading of the count.",
                "Few pairs are used for the controls; a wide interval there is no proof of absence.",
            ),
            "attribution": FigureText(
                "A first-order estimate of each patch against the patch itself.",
                "No claim rests on it: gradients miss what is saturated, as the points off the diagonal show.",
            ),
        },
    ),
    "retention_heads": Section(
        "Which heads read the number",
        "A reader attends to the tensor's own entry more than to others, writes more from it, and the decision loses "
        "when its edge to the entry is blocked. Heads are chosen on half of the graphs and confirmed on the others.",
        {
            "retention_heads": FigureText(
                "Layer by head, base and trained: attention from the decision to the entry, and the logits lost when "
                "that edge is blocked.",
                "A bright cell of attention alone is no reader: attention that nothing depends on is common.",
            ),
            "spans": FigureText(
                "Where the strongest heads look from the token that decides: at the entry, at others, at spans as "
                "long.",
                "It says nothing of what a head does with what it finds; that is the other figure's lower half.",
            ),
        },
    ),
    "logit_lens": Section(
        "When the answer takes shape",
        "The stream at each layer is read as if it were the last one: from where on is the answer's token on top?",
        {
            "logit_lens": FigureText(
                "Probability of the reference's choice read at each layer, base and trained, by slot of the answer.",
                "Early layers are unreliable: the final norm and the unembedding fit the last layer's stream only.",
            ),
            "rank": FigureText(
                "Rank of the reference's token among all tokens, 1 at the top.",
                "A good rank in an early layer does not mean that the model has decided there.",
            ),
            "heatmap": FigureText(
                "How far each layer's reading is from the model's own output.",
                "Where it is dark the reading says little, in whichever direction it points.",
            ),
            "divergence": FigureText(
                "Where the trained model's reading departs from the base model's, above the size of what the adapter "
                "wrote in each layer.",
                "That two curves go together over thirty layers is no proof that one causes the other.",
            ),
        },
    ),
    "knockout": Section(
        "Which layers' part of the adapter is needed, and which is enough",
        "The adapter's delta is switched off in one part of one layer, or on there alone, and the effect is measured "
        "again.",
        {
            "knockout": FigureText(
                "Logits of the effect that are lost without the adapter in one part of a layer, and gained with it in "
                "that part alone.",
                "Layers that replace one another show no loss, and layers that only work together show no gain.",
            ),
            "cumulative": FigureText(
                "How much of the effect is there with the adapter on below a boundary only, or above it only.",
                "A crossing is where half of the effect is reached, not where it is computed.",
            ),
            "profile": FigureText(
                "What a part costs against how much the adapter wrote there.",
                "Size is no measure of use: large deltas that serve other answers cost nothing here.",
            ),
            "score": FigureText(
                "The score in whole episodes with parts of the adapter off, and the share of valid answers.",
                "A lower score may come from invalid answers, not from worse decisions: read both columns.",
            ),
        },
    ),
    "lora_svd": Section(
        "Where the adapter wrote",
        "The delta of every module, from the adapter's weights alone: how large, of what rank, in which directions.",
        {
            "lora_svd": FigureText(
                "Size of the delta by layer and module, attention and MLP apart, whole and per parameter.",
                "Where most was written need not be where this decision is made; the other analyses say that.",
            ),
            "spectra": FigureText(
                "Singular values of every module, relative to the largest: how many directions it uses.",
                "It does not say what the directions mean.",
            ),
            "overlap": FigureText(
                "How far the delta lies in the leading directions of the base weights, beside random ones.",
                "A small overlap does not show that the base model cannot represent the fact.",
            ),
            "functional_size": FigureText(
                "How large the delta's output is beside the base weight's, on the activations of the pairs.",
                "A large output may still not reach the decision.",
            ),
        },
    ),
}  # fmt: skip

# name in the summary -> what the control is
CONTROLS = {
    "self": "B's own activations into B: must move nothing",
    "everything": "A's activations everywhere: must give A exactly",
    "other_position": "patched at another token of the same type",
    "other_key": "patched at the value of another key",
    "other_donor_a": "decision position of another pair's A",
    "other_donor_b": "decision position of another pair's B",
    "lora_span": "only the part along the adapter's directions",
    "lora_complement": "only the part outside the adapter's directions",
    "random_span": "only the part in a random subspace, same length",
    "zero_b": "A − B with the adapter's B set to zero",
    "random_b": "A − B with a random B of the same norm",
}

AUDIT = {
    "optimum": "optimal schedule",
    "optimum_without_retention": "optimal schedule without retention",
    "retention": "worth of retention",
    "heuristic": "heuristic (sees the observation only)",
    "best_constant": "best constant answer",
}
