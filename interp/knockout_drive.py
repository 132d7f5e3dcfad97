"""The runs of a knock-out: one pair under every configuration of the adapter, in one batch per model that grows.

A configuration has the layers below some layer l as they are in the base or in the trained model, and those above it as
well. So all that end in the same model go through it as one batch: at layer l the rows join that part from the recorded
stream there. A and B share one row, since all before their first difference is the same: B's tokens from there on stand
behind A's, see their own positions, and do not look at A's. For T tokens of A and S of B that is about 3 L^2 (T + S)
token-layers for the 6 L runs, instead of 12 L^2 T for a full forward each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from interp.shared_prefix import SharedPrefix, attending, rotary_of_layers
from interp.subject import Subject, UnsupportedArchitecture
from interp.sweep import MAX_TOKENS, run_pair
from interp.tokens import EncodedPair

PARTS = {"self_attn": "attention", "mlp": "mlp"}
OUTSIDE = (-1, "outside")

PartId = tuple[int, str]


@dataclass(frozen=True)
class Row:
    """One configuration of the adapter, and where its run joins the others.

    Attributes:
        model: what is switched: `base`, in which something is switched on, or `trained`, in which something is off.
        switch, part, layer: as in `interp.knockout.measure`.
        joins: it is the other model's recorded stream that enters this layer; or, for one part of one layer, it goes
            through this layer by itself.
    """

    model: str
    switch: str
    part: str
    layer: int
    joins: int

    @property
    def is_cumulative(self) -> bool:
        """Whether it switches all layers on one side of a boundary."""
        return self.part == "all"


@dataclass(frozen=True, kw_only=True)
class PackedPair(SharedPrefix):
    """Both prompts in one row: A's tokens, then B's from the first difference on. N tokens.

    It takes the place of a shared prefix (of no tokens) in the layers' attention.

    Attributes:
        ids: (N,) token ids.
        positions: (N,) each token's position in its own prompt.
        decisions: where A's and B's decision stand.
        start, end: first difference, and T.
    """

    ids: Tensor
    positions: Tensor
    decisions: tuple[int, int]
    start: int
    end: int

    @classmethod
    def make(cls, subject: Subject, pair: EncodedPair) -> PackedPair:
        """Pack the prompts of a pair for a subject."""
        config = subject.config.get_text_config()
        heads = config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        device = subject.causal_lm.device
        nothing = torch.empty(
            1, getattr(config, "num_key_value_heads", heads), 0, width, device=device, dtype=subject.causal_lm.dtype
        )
        start, end = pair.first_difference, len(pair.ids_a)
        return cls(
            keys=(nothing,) * subject.n_layers,
            values=(nothing,) * subject.n_layers,
            ids=torch.tensor([*pair.ids_a, *pair.ids_b[start:]], device=device),
            positions=torch.tensor([*range(end), *range(start, end)], device=device),
            decisions=(end - 1, 2 * end - start - 1),
            start=start,
            end=end,
        )

    def _mask(self, length: int, window: int | None, groups: int) -> Tensor | None:
        at = torch.arange(length, device=self.positions.device)
        distance = self.positions[:, None] - self.positions[None, :]  # (query, key)
        of_a, of_b = (at >= self.start) & (at < self.end), at >= self.end
        allowed = (distance >= 0) & ~(of_b[:, None] & of_a[None, :]) & ~(of_a[:, None] & of_b[None, :])
        allowed[: self.start, self.end :] = False
        if window is not None:
            allowed &= distance < window
        return allowed.repeat(groups, 1)


def adapted_parts(subject: Subject) -> dict[PartId, tuple[str, ...]]:
    """(layer, part) -> the adapted modules in it, by layer; those outside all layers are at (-1, `outside`)."""
    decoder = subject.decoder
    path = next(name for name, module in subject.causal_lm.named_modules() if module is decoder)
    prefix = f"{path}.layers." if path else "layers."

    def part_of(name: str) -> PartId:
        if not name.startswith(prefix):
            return OUTSIDE
        layer, component = name.removeprefix(prefix).split(".")[:2]
        return int(layer), PARTS.get(component, "other")

    ordered = sorted((part_of(name), name) for name in subject.adapted_modules)
    return {part: tuple(name for _, name in names) for part, names in groupby(ordered, key=lambda found: found[0])}


class Drive:
    """One pair on its way through the layers, with what base and trained recorded there."""

    def __init__(self, subject: Subject, pair: EncodedPair) -> None:
        self.subject, self.pair = subject, pair
        self.decoder, self.parts = subject.decoder, adapted_parts(subject)
        self.packed = PackedPair.make(subject, pair)
        self.switches: dict[str, Callable[[], AbstractContextManager]] = {
            "base": subject.base, "trained": subject.trained,
        }  # fmt: skip
        self.streams: dict[str, list[Tensor]] = {}  # per layer (1, N, d_model), and what the last one returns
        self.logits: dict[str, Tensor] = {}  # (1, 2, vocab)
        for model, switched in self.switches.items():
            with switched():
                self.streams[model], self.logits[model] = self.record()

    def record(self) -> tuple[list[Tensor], Tensor]:
        """The streams of the model as it is switched now, and its logits at the two decisions."""
        streams = [self.decoder.embed_tokens(self.packed.ids[None])]
        for index in range(self.subject.n_layers):
            streams.append(self.layer(index, streams[-1]))
        return streams, self.unembed(streams[-1])

    def layer(self, index: int, batch: Tensor) -> Tensor:
        """What a layer returns for a batch of packed streams, (rows, N, width)."""
        positions = self.packed.positions[None]
        rotary = rotary_of_layers(self.decoder, batch, positions)
        with attending(self.decoder):
            found: Tensor = self.decoder.layers[index](
                batch,
                attention_mask=self.packed,
                position_ids=positions,
                position_embeddings=rotary[index],
                use_cache=False,
            )
        return found

    def unembed(self, batch: Tensor) -> Tensor:
        """(rows, 2, vocab) float32 logits at A's and B's decision."""
        decided = self.decoder.norm(batch[:, list(self.packed.decisions)])
        logits: Tensor = self.subject.causal_lm.get_output_embeddings()(decided).float()
        return logits

    def differences(self, logits: Tensor) -> Tensor:
        """(rows, 2) logit of the answer minus that of the foil, in A and in B, float64."""
        return (logits[..., self.pair.answer[0]] - logits[..., self.pair.foil[0]]).double().cpu()

    def engine_error(self, model: str) -> float:
        """The largest difference from the logits of the model's own forward, as it is switched now.

        Raises:
            UnsupportedArchitecture: if it is more than rounding.
        """
        own = torch.stack([run.logits for run in run_pair(self.subject, self.pair)])
        error = float((self.logits[model][0] - own).abs().max())
        tolerance = max(1e-3, 64 * torch.finfo(self.subject.causal_lm.dtype).eps) * float(own.std())
        if not error <= tolerance:
            raise UnsupportedArchitecture(
                f"{type(self.subject.causal_lm).__name__}: expected this architecture driven layer by layer to give "
                f"the logits of its own forward within {tolerance:.2g}, found a difference of {error:.2g}"
            )
        return error

    def configurations(self, model: str) -> Iterator[tuple[Row, Tensor]]:
        """Every row whose last layers are this model's, with its logit differences (2,)."""
        size = max(1, MAX_TOKENS // len(self.packed.ids))
        rows = self.rows(model)
        for at in range(0, len(rows), size):
            chunk = rows[at : at + size]
            yield from zip(chunk, self.differences(self.grow(model, chunk)), strict=True)
        if OUTSIDE in self.parts:
            switch = "on" if model == "base" else "off"
            with self.flipped(model, OUTSIDE):
                yield Row(model, switch, OUTSIDE[1], OUTSIDE[0], 0), self.differences(self.record()[1])[0]

    def rows(self, model: str) -> list[Row]:
        """In the order in which they join. What comes from the other model joins a layer before it is run."""
        made: list[Row] = []
        for layer in range(self.subject.n_layers + 1):
            if model == "trained" and layer < self.subject.n_layers:
                made.append(Row("base", "on_from", "all", layer, layer))
            if model == "base" and layer > 0:
                made.append(Row("base", "on_up_to", "all", layer - 1, layer))
            switch = "on" if model == "base" else "off"
            made += [Row(model, switch, part, layer, layer) for at, part in self.parts if at == layer]
        return made

    def grow(self, model: str, rows: Sequence[Row]) -> Tensor:
        """Drive a batch through the layers that the rows join as it comes by; (rows, 2, vocab) logits."""
        other = "trained" if model == "base" else "base"
        batch = self.streams[model][0][:0]
        for index in range(rows[0].joins, self.subject.n_layers + 1):
            mine = [row for row in rows if row.joins == index]
            batch = torch.cat([batch, *(self.streams[other][index] for row in mine if row.is_cumulative)])
            if index == self.subject.n_layers:
                break
            if len(batch):
                with self.switches[model]():
                    batch = self.layer(index, batch)
            for row in mine:
                if not row.is_cumulative:
                    with self.flipped(model, (index, row.part)):
                        batch = torch.cat([batch, self.layer(index, self.streams[model][index])])
        with self.switches[model]():
            return self.unembed(batch)

    def flipped(self, model: str, part: PartId) -> AbstractContextManager:
        """The model but for one part, which is as in the other one."""
        names = self.parts[part]
        return self.subject.only(names) if model == "base" else self.subject.without(names)
