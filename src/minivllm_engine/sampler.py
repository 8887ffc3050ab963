"""Logits to token ids. What a row gets depends on its own logits, parameters and counters alone.

All of it are torch operations on the logits' device, of which none waits for it before `Draw.results`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from minivllm_engine.device_copy import on_device
from minivllm_engine.request import PositionLogprobs, ResolvedSampling, TokenLogprob

_MASK64 = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
# A row whose top-k is at most this is drawn from so many of its largest logits, always: what it gets must
# not depend on the top-k of others.
_FEW = 64
# Rows are sorted in groups of at most this many float64 values.
_GROUP_ELEMENTS = 8 * 2**20


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What decides one row's token beside its logits.

    Attributes:
        index: number of the output among the request's `n`.
        position: absolute position of the token to be sampled.
        prompt_ids, output_ids: known tokens, for the penalties.
        forbidden_ids: ids that cannot be sampled now (end ids before `min_tokens`).
    """

    params: ResolvedSampling
    index: int
    position: int
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    forbidden_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Sampled:
    """One row's result. `token_id` is None where the logits are dead: not finite, or all equal."""

    token_id: int | None
    logprobs: PositionLogprobs | None = None


def random_uniform(seed: int, index: int, position: int) -> float:
    """A number in [0, 1) that is a pure function of its arguments (SplitMix64's mixer, chained)."""
    state = _mix(seed & _MASK64)
    state = _mix((state + index) & _MASK64)
    state = _mix((state + position) & _MASK64)
    return (state >> 11) * 2.0**-53


def score(
    hidden: torch.Tensor,
    tokens: Sequence[tuple[int, int]],
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    vocab_size: int,
) -> list[PositionLogprobs | None]:
    """Logprobs of tokens that are known. Rows are taken in groups: their logits are never all there.

    Args:
        hidden: [num_rows, hidden_size].
        tokens: for each row the token that comes next, and how many of the likeliest are wanted.
        logits_of: makes logits of some of the rows, [_, vocab_size].

    Returns:
        One entry a row; None where the logits are dead.
    """
    results: list[PositionLogprobs | None] = []
    group = max(16, _GROUP_ELEMENTS // vocab_size)
    for at in range(0, len(tokens), group):
        logits = logits_of(hidden[at : at + group]).float()
        reports = _logprobs(logits, tokens[at : at + group])
        results += [
            r if ok else None for r, ok in zip(reports, _alive(logits).tolist(), strict=True)
        ]
    return results


@dataclass(frozen=True, slots=True)
class Draw:
    """Tokens that may still be on their way: nothing here has waited for the device.

    Attributes:
        token_ids: [num_rows] int64, on the device of the logits; valid ids, also of dead rows.
        alive: [num_rows] bool, likewise: are the logits finite, and not all equal?
        logits: [num_rows, vocab] fp32, as the model gave them.
        rows: one entry a row.
    """

    token_ids: torch.Tensor
    alive: torch.Tensor
    logits: torch.Tensor
    rows: Sequence[SamplingRow]

    def results(self) -> list[Sampled]:
        """Wait for the tokens, and report what was asked for."""
        token_ids = self.token_ids.where(self.alive, -1).tolist()
        reports = _reports(self.logits, self.rows, token_ids)
        return [
            Sampled(token_id, reports.get(i)) if token_id >= 0 else Sampled(None)
            for i, token_id in enumerate(token_ids)
        ]


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[Sampled]:
    """Draw one token a row, and wait for it. Arguments as for `draw`."""
    return draw(logits, rows).results()


def draw(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> Draw:
    """Queue the drawing of one token a row on the device of the logits.

    Args:
        logits: [num_rows, vocab], any float dtype; not modified.
        rows: one entry a row.
    """
    raw = logits.float()
    adjusted = _adjust(raw, rows)
    token_ids = adjusted.nan_to_num().argmax(dim=-1)
    drawn = [i for i, row in enumerate(rows) if row.params.temperature]
    vocab = raw.shape[-1]
    few = [i for i in drawn if 0 < rows[i].params.top_k <= _FEW < vocab]
    for members, width in ((few, _FEW), (sorted({*drawn} - {*few}), vocab)):
        group = max(1, _GROUP_ELEMENTS // width)
        for at in range(0, len(members), group):
            chosen = members[at : at + group]
            index = on_device(chosen, torch.int64, raw.device)
            some = adjusted.index_select(0, index)
            ordered, ids = _largest(some) if width < vocab else _sorted(some)
            picked = _pick(ordered, ids, vocab, [rows[i] for i in chosen])
            token_ids.index_copy_(0, index, picked)
    return Draw(token_ids, _alive(raw), raw, rows)


def _alive(logits: torch.Tensor) -> torch.Tensor:
    finite = logits.isfinite().all(dim=-1)
    if logits.shape[-1] > 1:
        # A head that was never loaded gives equal logits, which no real model does.
        finite &= logits.amax(dim=-1) != logits.amin(dim=-1)
    return finite


def _sorted(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return logits.sort(dim=-1, descending=True, stable=True)


def _largest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first _FEW values and ids of a stable descending sort, without the sort."""
    vocab = logits.shape[-1]
    # As integers floats are in order, but for the negative ones, whose order is reversed, and -0.
    bits = (logits + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    # Of equal values the one with the smallest id has the largest key.
    backwards = torch.arange(vocab - 1, -1, -1, device=logits.device)
    keys = (ordered.long() << 32) | backwards
    ids = vocab - 1 - (keys.topk(_FEW).values & 0xFFFFFFFF)
    return logits.gather(1, ids), ids


def _adjust(raw: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Penalties, bias and forbidden ids; `raw` itself where no row asks for any."""
    changed = [i for i, row in enumerate(rows) if _needs_adjusting(row)]
    if not changed:
        return raw
    logits = raw.clone()
    for i in changed:
        _adjust_row(logits[i], rows[i])
    return logits


def _needs_adjusting(row: SamplingRow) -> bool:
    p = row.params
    penalised = p.repetition_penalty != 1 or p.presence_penalty or p.frequency_penalty
    return bool(penalised or p.logit_bias or row.forbidden_ids)


def _adjust_row(logits: torch.Tensor, row: SamplingRow) -> None:
    p = row.params
    if p.repetition_penalty != 1:
        seen = _id_tensor({*row.prompt_ids, *row.output_ids}, logits)
        values = logits[seen]
        logits[seen] = torch.where(
            values > 0, values / p.repetition_penalty, values * p.repetition_penalty
        )
    if row.output_ids and (p.presence_penalty or p.frequency_penalty):
        counts = Counter(row.output_ids)
        penalties = [p.presence_penalty + p.frequency_penalty * n for n in counts.values()]
        logits[_id_tensor(counts, logits)] -= on_device(penalties, torch.float32, logits.device)
    for token_id, bias in p.logit_bias.items():
        logits[token_id] += bias
    if row.forbidden_ids:
        logits[_id_tensor(row.forbidden_ids, logits)] = -torch.inf


def _id_tensor(ids: Iterable[int], like: torch.Tensor) -> torch.Tensor:
    return on_device(list(ids), torch.int64, like.device)


def _pick(
    ordered: torch.Tensor, ids: torch.Tensor, vocab: int, rows: Sequence[SamplingRow]
) -> torch.Tensor:
    """Sample from the truncated distributions by inverting their cumulative sums. [num_rows]

    Temperature, then top-k, top-p and min-p, each on what the one before has left, renormalised.

    Args:
        ordered, ids: [num_rows, width], the largest logits from the largest down, and their tokens. All
            tokens, or at least top-k of them.
    """

    def column(values: list[float]) -> torch.Tensor:
        return on_device(values, torch.float64, ordered.device)[:, None]

    ordered = ordered.double()
    # The largest logit is taken off first: divided by a tiny temperature it would overflow.
    scaled = (ordered - ordered[:, :1]) / column([row.params.temperature for row in rows])
    top_k = [row.params.top_k for row in rows]
    rank = torch.arange(ordered.shape[-1], device=ordered.device)
    keep = rank < column([float(k if 0 < k < vocab else vocab) for k in top_k])
    probs = scaled.masked_fill(~keep, -torch.inf).softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs
    keep = (before < column([row.params.top_p for row in rows])) | (rank == 0)
    probs = probs * keep
    keep = probs >= probs[:, :1] * column([row.params.min_p for row in rows])
    probs = probs * keep
    cumulative = probs.cumsum(dim=-1)
    uniform = column([random_uniform(row.params.seed, row.index, row.position) for row in rows])
    place = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    # Rounding must not land beyond the last token that was kept; of a dead row none was.
    last = (probs > 0).sum(dim=-1, keepdim=True) - 1
    return ids.gather(1, place.minimum(last).clamp(min=0)).squeeze(1)


def _reports(
    raw: torch.Tensor, rows: Sequence[SamplingRow], token_ids: Sequence[int]
) -> dict[int, PositionLogprobs]:
    """Logprobs of the rows that ask for them."""
    counts = {i: row.params.logprobs for i, row in enumerate(rows)}
    wanted = [(i, n) for i, n in counts.items() if n is not None and token_ids[i] >= 0]
    group = max(1, _GROUP_ELEMENTS // raw.shape[-1])
    found: dict[int, PositionLogprobs] = {}
    for at in range(0, len(wanted), group):
        some = wanted[at : at + group]
        places = [i for i, _ in some]
        tokens = [(token_ids[i], count) for i, count in some]
        found |= zip(places, _logprobs(raw[places], tokens), strict=True)
    return found


def _logprobs(logits: torch.Tensor, tokens: Sequence[tuple[int, int]]) -> list[PositionLogprobs]:
    """Of one token a row, and of as many of the likeliest as stand beside it."""
    logprobs = logits.double().log_softmax(dim=-1)
    most = min(max(count for _, count in tokens), logprobs.shape[-1])
    top_values, top_ids = (part.tolist() for part in logprobs.topk(most))
    ids = torch.tensor([[token_id] for token_id, _ in tokens], device=logits.device)
    own = logprobs.gather(1, ids)
    ranks = (logprobs > own).sum(dim=-1).tolist()
    found = []
    for i, ((token_id, count), value) in enumerate(zip(tokens, own[:, 0].tolist(), strict=True)):
        pairs = zip(top_ids[i][:count], top_values[i][:count], strict=True)
        top = tuple(TokenLogprob(*pair, place) for place, pair in enumerate(pairs, start=1))
        found.append(PositionLogprobs(TokenLogprob(token_id, value, ranks[i] + 1), top))
    return found


def _mix(value: int) -> int:
    value = (value + _GOLDEN) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)
