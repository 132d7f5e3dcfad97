"""The patching engine: the patches of all layers in one pass.

For a recipient run x, a donor run y and token positions Q, cell l is the model's output after

    h_l[q] <- h_l^y[q]  for q in Q,    h_l[i] = h_l^x[i]  elsewhere,    h_{k+1} = layer_k(h_k)  for k >= l,

where h_l is the residual stream that enters layer l, and h_L what the last layer returns, before the final norm. With
recipient B and donor A that is denoising, the other way round noising; the donor may be any run of as many tokens.

Everything before the first position of Q is the recipient's own in every cell, and so are all layers below l. So the
tokens from there on go through the layers once, as a batch that grows: at the input of layer l one row joins, the
recipient's recorded stream with the donor's put in. L layers and S tokens from the first position to the end cost
S L (L + 1) / 2 token-layers for all L + 1 cells, against (L + 1) L T for a full forward per cell.

Rows carry the answer's tokens after the decision, so that the answer's log-probability is exact under the patch (the
streams of these tokens are the recipient's until the patch acts on them through attention).

Caveats. Two kinds of cells are known and not computed again. Where the donor's stream is the recipient's at all of Q,
the cell is the recipient's run: a run patched into itself changes nothing, exactly. And where the prompts differ at Q
only, the cell of layer 0 is the donor's run. All other cells equal a full forward up to rounding. Prompts are run
one by one, without padding. Before a model is used for the first time the engine compares itself with the model's own
forward, and refuses where they differ.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import DynamicCache

from interp.memory_limit import rows_that_fit
from interp.recording import is_pre_norm, recording
from interp.shared_prefix import SharedPrefix, attending, rotary_of_layers
from interp.subject import Subject, UnsupportedArchitecture, find_decoder

if TYPE_CHECKING:
    from interp.tokens import EncodedPair

MAX_TOKENS = 4096  # rows times tokens in one pass: bounds the memory, and is more than fills the cores
COVERED_LAYER_TYPES = {"full_attention", "sliding_attention"}

_proven: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class SweepError(ValueError):
    """Runs that cannot be patched into one another; says what was expected and found."""


@dataclass(frozen=True)
class Run:
    """One prompt through one model, with what patching needs. T prompt tokens, L layers.

    Attributes:
        ids: (T,) the prompt's tokens; the last one is the decision position.
        answer: the tokens whose log-probability is taken.
        tail: those of them that are fed after the decision, all but the last.
        start: first position whose residual stream is recorded.
        residual: (L + 1, T - start, d_model), the stream that enters layer l; row L is what the last layer returns.
        tail_residual: (L + 1, len(tail), d_model), the same for the tail.
        keys, values: per layer (1, kv_heads, T, d_head), keys after rotary.
        logits: (vocab,) at the decision position, float32.
        answer_log_prob: log-probability of the answer in nats, summed over its tokens.
        trained: whether the adapter was on; None for a model without one.
        components: `attention`, `mlp` (L, T - start, d_model), what they add to the stream, and `heads`
            (L, T - start, n_heads * d_head), what enters `o_proj`. Empty where layers are not `is_pre_norm`.
    """

    ids: tuple[int, ...]
    answer: tuple[int, ...]
    tail: tuple[int, ...]
    start: int
    residual: Tensor
    tail_residual: Tensor
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    logits: Tensor
    answer_log_prob: float
    trained: bool | None
    components: Mapping[str, Tensor] = field(default_factory=dict)

    def stream(self, layer: int, first: int) -> Tensor:
        """(T - first + len(tail), d_model) the stream that enters a layer, from position `first` to the tail's end."""
        return torch.cat([self.residual[layer, first - self.start :], self.tail_residual[layer]])

    def to_decision(self) -> Run:
        """The same run without the tail: less work, and only the answer's first token is scored."""
        answer = self.answer[:1]
        log_prob = float(_answer_log_probs(self.logits[None, None], answer))
        return replace(self, answer=answer, tail=(), tail_residual=self.tail_residual[:, :0], answer_log_prob=log_prob)


@dataclass(frozen=True)
class Patched:
    """What the recipient's model says with the donor's stream put in, per layer.

    Attributes:
        logits: (L + 1, vocab) at the decision position, float32; row l: the stream entering layer l was patched.
        answer_log_prob: (L + 1,) log-probability of the answer in nats, summed over its tokens.
    """

    logits: Tensor
    answer_log_prob: Tensor


@torch.inference_mode()
def run_pair(model: Subject | nn.Module, pair: EncodedPair) -> tuple[Run, Run]:
    """Run prompts A and B through the model as it is now switched; their shared prefix is computed once.

    Args:
        model: a subject, or a Hugging Face causal model.

    Returns:
        A's run and B's; in both the pair's answer is the one whose log-probability is taken.

    Raises:
        UnsupportedArchitecture: for a model that the engine does not cover.
    """
    causal = _causal_lm(model)
    decoder = _decoder(causal)
    start, tail = pair.first_difference, tuple(pair.answer[:-1])
    cache = DynamicCache()  # full length in every layer; the model's masks keep its windows
    if start > 0:
        decoder(input_ids=_row(pair.ids_a[:start], causal), cache=cache, use_cache=True)
        cache.batch_repeat_interleave(2)
    suffixes = torch.cat([_row((*ids[start:], *tail), causal) for ids in (pair.ids_a, pair.ids_b)])
    with recording(decoder) as recorded:
        logits = causal(input_ids=suffixes, cache=cache, use_cache=True, logits_to_keep=len(pair.answer)).logits.float()
    residual = torch.stack(recorded.streams)  # (L + 1, 2, S, d_model)
    components = {name: torch.stack(recorded.of(name)) for name in ("attention", "mlp", "heads") if recorded.of(name)}
    trained, length = _is_trained(causal), len(pair.ids_a)

    def run(row: int, ids: Sequence[int]) -> Run:
        return Run(
            ids=tuple(ids),
            answer=tuple(pair.answer),
            tail=tail,
            start=start,
            residual=residual[:, row, : length - start],
            tail_residual=residual[:, row, length - start :],
            keys=tuple(layer.keys[row : row + 1, :, :length] for layer in cache.layers),
            values=tuple(layer.values[row : row + 1, :, :length] for layer in cache.layers),
            logits=logits[row, 0],
            answer_log_prob=float(_answer_log_probs(logits[row : row + 1], pair.answer)),
            trained=trained,
            components={name: table[:, row, : length - start] for name, table in components.items()},
        )

    return run(0, pair.ids_a), run(1, pair.ids_b)


@torch.inference_mode()
def patch(
    model: Subject | nn.Module,
    recipient: Run,
    donor: Run,
    positions: Sequence[int],
    layers: Sequence[int] | None = None,
) -> Patched:
    """The recipient's run with the donor's residual stream put in at some positions, for every layer.

    Args:
        model: the subject or causal model that the recipient was run through, switched as it was then.
        donor: any run with as many tokens: the pair's other one, another pair's, the other model's.
        positions: token positions, patched together; each from the later `start` of the two runs to T - 1.
        layers: ascending; the cells asked for, which are then all that is returned. None is 0 to L.

    Raises:
        SweepError: if the runs do not fit together, a position is out of range, or the model is switched otherwise than
            it was for the recipient.
        UnsupportedArchitecture: on first use, if the engine's result is not the model's own.
    """
    causal, decoder, chosen = checked(model, recipient, donor, positions)
    here, there = (torch.tensor(chosen, device=run.residual.device) - run.start for run in (recipient, donor))
    asked = list(range(len(recipient.residual)) if layers is None else layers)
    differs = (recipient.residual[:, here] != donor.residual[:, there]).flatten(1).any(1)[asked]
    logits = recipient.logits.repeat(len(differs), 1)
    answer = torch.full_like(logits[:, 0], recipient.answer_log_prob)
    if asked[0] == 0 and differs[0] and _embeds_as_donor(recipient, donor, chosen):
        differs[0], logits[0], answer[0] = False, donor.logits, donor.answer_log_prob
    cells = [(layer, donor.residual[layer, there]) for layer, moves in zip(asked, differs, strict=True) if moves]
    found = drive(causal, decoder, recipient, chosen, cells)
    logits[differs], answer[differs] = found.logits, found.answer_log_prob
    return Patched(logits=logits, answer_log_prob=answer)


def drive(
    causal: Any, decoder: Any, recipient: Run, positions: Sequence[int], cells: Sequence[tuple[int, Tensor]]
) -> Patched:
    """The recipient's run with other streams at some positions: the growing batch, in passes of bounded memory.

    Args:
        positions: in ascending order, as `checked` returns them.
        cells: (l, (len(positions), d_model)): what enters layer l there; layers ascending, any number for each.

    Returns:
        One row per cell, in their order.
    """
    first = positions[0]
    at = torch.tensor(positions, device=recipient.residual.device) - first
    logits = recipient.logits.new_empty(len(cells), recipient.logits.shape[-1])
    answer = logits.new_empty(len(cells))
    most = max(1, MAX_TOKENS // (len(recipient.ids) - first + len(recipient.tail)))
    size, done = rows_that_fit(causal, recipient, positions, len(cells), most), 0
    for chunk in (cells[start : start + size] for start in range(0, len(cells), size)):
        rows: dict[int, Tensor] = {}
        for layer in dict.fromkeys(layer for layer, _ in chunk):
            values = torch.stack([value for index, value in chunk if index == layer])
            rows[layer] = recipient.stream(layer, first).repeat(len(values), 1, 1)
            rows[layer][:, at] = values
        found = _grow(causal, decoder, recipient, first, rows)
        logits[done : done + len(chunk)] = found[:, 0]
        answer[done : done + len(chunk)] = _answer_log_probs(found, recipient.answer)
        done += len(chunk)
    return Patched(logits=logits, answer_log_prob=answer)


def checked(model: Any, recipient: Run, donor: Run, positions: Sequence[int]) -> tuple[Any, Any, list[int]]:
    """The causal model, its decoder, compared with its own forward once, and the positions in ascending order.

    Raises:
        SweepError, UnsupportedArchitecture: as `patch`.
    """
    causal = _causal_lm(model)
    decoder = _decoder(causal)
    chosen = _checked_positions(causal, recipient, donor, positions)
    if decoder not in _proven:
        _prove(causal, decoder, recipient)
    return causal, decoder, chosen


def _grow(causal: Any, decoder: Any, recipient: Run, first: int, rows: Mapping[int, Tensor]) -> Tensor:
    """Drive a batch through the layers that grows by `rows[l]`, (n, S, d_model) or (S, d_model), at layer l's input.

    Returns:
        (rows in all, len(tail) + 1, vocab) float32 logits from the decision position on, in the order of layers.
    """
    n_layers, end = len(decoder.layers), len(recipient.ids) + len(recipient.tail)
    prefix = SharedPrefix(
        tuple(key[:, :, :first] for key in recipient.keys), tuple(value[:, :, :first] for value in recipient.values)
    )
    positions = torch.arange(first, end, device=recipient.residual.device)[None]
    rotary = rotary_of_layers(decoder, recipient.residual, positions)
    batch = recipient.residual.new_empty(0, end - first, recipient.residual.shape[-1])
    options: dict[str, Any] = {"attention_mask": prefix, "position_ids": positions, "use_cache": False}
    kept = len(recipient.answer)  # positions that are unembedded
    with attending(decoder):
        for index in range(min(rows), n_layers + 1):
            if index in rows:
                joining = rows[index].reshape(-1, *rows[index].shape[-2:])
                batch = torch.cat([batch, joining[:, -batch.shape[1] :]])
            options["position_embeddings"] = rotary[min(index, n_layers - 1)]
            if index < n_layers - 1:
                batch = decoder.layers[index](batch, **options)
            elif index == n_layers - 1:
                batch = _last_layer(decoder.layers[index], batch, kept, options)
    return causal.get_output_embeddings()(decoder.norm(batch[:, -kept:])).float()


def _last_layer(layer: Any, batch: Tensor, kept: int, options: dict[str, Any]) -> Tensor:
    """The last layer, whose MLP is needed at the `kept` last positions only; whole where it is not made as most are."""
    if not is_pre_norm(layer):
        return layer(batch, **options)
    attended, _ = layer.self_attn(layer.input_layernorm(batch), **options)
    batch = batch[:, -kept:] + attended[:, -kept:]
    return batch + layer.mlp(layer.post_attention_layernorm(batch))


def _embeds_as_donor(recipient: Run, donor: Run, positions: list[int]) -> bool:
    """Whether the patch at the input of layer 0 makes the recipient the donor, whose result is then the cell's: both
    runs are of one call, so of one model and answer, and have the same tokens everywhere else."""
    one_call = recipient.residual.untyped_storage().data_ptr() == donor.residual.untyped_storage().data_ptr()
    elsewhere = (i for i in range(len(recipient.ids)) if i not in positions)
    return one_call and all(recipient.ids[i] == donor.ids[i] for i in elsewhere)


def _prove(causal: Any, decoder: nn.Module, run: Run) -> None:
    """Compare the engine with the model's own forward on a run, patched into itself without the shortcut."""
    name = type(causal).__name__
    ids = _row((*run.ids, *run.tail), causal)
    expected = causal(input_ids=ids, use_cache=False, logits_to_keep=len(run.answer)).logits[0].float()
    n_layers = len(run.residual) - 1
    rows = {layer: run.stream(layer, run.start) for layer in (0, n_layers // 2, n_layers)}
    try:
        found = _grow(causal, decoder, run, run.start, rows)
    except (TypeError, AttributeError) as error:
        raise UnsupportedArchitecture(f"{name}: this architecture cannot be driven layer by layer: {error}") from error
    difference = max(float((found - expected).abs().max()), float((run.logits - expected[0]).abs().max()))
    tolerance = max(1e-3, 64 * torch.finfo(causal.dtype).eps) * float(expected.std())
    if not difference <= tolerance:
        raise UnsupportedArchitecture(
            f"{name}: expected this architecture driven layer by layer to give the logits of its own forward within "
            f"{tolerance:.2g}, found a difference of {difference:.2g}: it is not covered by the patching engine"
        )
    _proven.add(decoder)


def _causal_lm(model: Any) -> Any:
    return model.causal_lm if isinstance(model, Subject) else model


def _decoder(causal: Any) -> Any:
    """The stack of layers, checked for what the engine relies on."""
    decoder = find_decoder(causal)
    others = set(getattr(decoder.config, "layer_types", None) or ()) - COVERED_LAYER_TYPES
    if others:
        raise UnsupportedArchitecture(
            f"{type(causal).__name__}: this architecture is not covered by the patching engine: expected full or "
            f"sliding attention in every layer, found {', '.join(sorted(others))}"
        )
    return decoder


def _checked_positions(causal: Any, recipient: Run, donor: Run, positions: Sequence[int]) -> list[int]:
    length, start = len(recipient.ids), max(recipient.start, donor.start)
    if len(donor.ids) != length or len(donor.residual) != len(recipient.residual):
        raise SweepError(f"donor: expected {length} tokens, as the recipient has, found {len(donor.ids)}")
    chosen = sorted(set(positions))
    if not chosen or chosen[0] < start or chosen[-1] >= length:
        raise SweepError(f"positions: expected some from {start} to {length - 1}, found {list(positions)}")
    if recipient.trained != _is_trained(causal):
        raise SweepError(
            f"recipient: expected a run of the model as it is switched now (trained: {_is_trained(causal)}), "
            f"found one with trained: {recipient.trained}"
        )
    return chosen


def _is_trained(causal: nn.Module) -> bool | None:
    layers = (module for module in causal.modules() if isinstance(module, BaseTunerLayer))
    return next((not layer.disable_adapters for layer in layers), None)


def _answer_log_probs(logits: Tensor, answer: Sequence[int]) -> Tensor:
    """(rows,) log-probability of the answer's tokens, summed, from (rows, len(answer), vocab) logits."""
    target = torch.tensor(answer, device=logits.device).expand(len(logits), -1)[..., None]
    return (logits.gather(-1, target)[..., 0] - logits.logsumexp(-1)).sum(-1)


def _row(ids: Sequence[int], causal: Any) -> Tensor:
    return torch.tensor([list(ids)], device=causal.device)
