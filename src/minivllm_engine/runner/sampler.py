"""Logits to token ids. What a row gets depends on its own logits, parameters and counters alone.

All of it are torch operations on the logits' device, of which none waits for it before
`SampleHandle.results`.
Whoever draws from logits may overwrite them as soon as `draw` has returned.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from minivllm_engine.core.outputs import PositionLogprobs, TokenLogprob
from minivllm_engine.core.sampling_params import ResolvedSampling
from minivllm_engine.ops.sampling.reference import greedy
from minivllm_engine.tensors.device_copy import HostCopy, on_device

Greedy = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

_MASK64 = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
# A row whose top-k is at most this is drawn from so many of its largest logits, always: what it gets must
# not depend on the top-k of others.
_FEW = 64
# Rows are sorted in groups of at most this many float64 values.
_GROUP_ELEMENTS = 8 * 2**20


@dataclass(slots=True)
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


class Sampled(NamedTuple):
    """One row's result. `token_id` is None where the logits are non-finite, or all equal."""

    token_id: int | None
    logprobs: PositionLogprobs | None = None


def random_uniform(seed: int, index: int, position: int) -> float:
    """Return a number in [0, 1) that is a pure function of its arguments (SplitMix64's mixer, chained)."""
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
        tokens: for each row the token that comes next, and how many of the most likely are wanted.
        logits_of: makes logits of some of the rows, [_, vocab_size].

    Returns:
        One entry a row; None where the logits are non-finite.
    """
    results: list[PositionLogprobs | None] = []
    group = max(16, _GROUP_ELEMENTS // vocab_size)
    for at in range(0, len(tokens), group):
        logits = logits_of(hidden[at : at + group]).float()
        some = tokens[at : at + group]
        ids = on_device([token_id for token_id, _ in some], torch.int64, logits.device)
        reports = _Logprobs(logits, ids, [count for _, count in some]).results()
        alive = greedy(logits)[1].tolist()
        results += [r if ok else None for r, ok in zip(reports, alive, strict=True)]
    return results


class SampleHandle:
    """Tokens that may still be on their way: nothing here has waited for the device.

    Attributes:
        token_ids: [num_rows] int64, on the device of the logits; valid ids, also of non-finite rows.
        alive: [num_rows] bool, likewise: are the logits finite, and not all equal?
    """

    def __init__(
        self,
        token_ids: torch.Tensor,
        alive: torch.Tensor,
        reports: Sequence[tuple[Sequence[int], "_Logprobs"]] = (),
    ) -> None:
        """reports: places of some rows, and what is to be told of them."""
        self.token_ids, self.alive = token_ids, alive
        self._tokens = HostCopy(token_ids.where(alive, -1))
        self._reports = reports

    def results(self) -> list[Sampled]:
        """Wait for the tokens, and report what was asked for."""
        sampled = [Sampled(i) if i >= 0 else _DEAD for i in self._tokens.tolist()]
        for places, logprobs in self._reports:
            for place, report in zip(places, logprobs.results(), strict=True):
                if sampled[place].token_id is not None:
                    sampled[place] = Sampled(sampled[place].token_id, report)
        return sampled


_DEAD = Sampled(None)


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[Sampled]:
    """Draw one token a row, and wait for it. Arguments as for `draw`."""
    return draw(logits, rows).results()


def draw(
    logits: torch.Tensor,
    rows: Sequence[SamplingRow],
    *,
    greedy: Greedy = greedy,
    argmax: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> SampleHandle:
    """Queue the drawing of one token a row on the device of the logits.

    Args:
        logits: [num_rows, vocab], any float dtype; not modified.
        rows: one entry a row.
        greedy: finds the largest logit of each row, see ops/sampling.
        argmax: what it gives for these logits, if that is known.
    """
    token_ids, alive = argmax or greedy(logits)
    changed = [i for i, row in enumerate(rows) if _needs_adjusting(row)]
    drawn = [i for i, row in enumerate(rows) if row.params.temperature]
    told = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    if changed or drawn:
        token_ids = token_ids.clone()
        adjusted = _adjust(logits.float(), rows, changed)
        if changed:
            index = on_device(changed, torch.int64, logits.device)
            token_ids.index_copy_(0, index, greedy(adjusted.index_select(0, index))[0])
        _draw_into(token_ids, adjusted, rows, drawn)
    reports = []
    group = max(1, _GROUP_ELEMENTS // logits.shape[-1])
    for at in range(0, len(told), group):
        some = told[at : at + group]
        index = on_device(some, torch.int64, logits.device)
        counts = [rows[i].params.logprobs or 0 for i in some]
        own = token_ids.index_select(0, index)
        reports.append((some, _Logprobs(logits.index_select(0, index), own, counts)))
    return SampleHandle(token_ids, alive, reports)


def _draw_into(
    token_ids: torch.Tensor,
    adjusted: torch.Tensor,
    rows: Sequence[SamplingRow],
    drawn: Sequence[int],
) -> None:
    """Overwrite the tokens of the rows `drawn` by random ones."""
    vocab = adjusted.shape[-1]
    few = [i for i in drawn if 0 < rows[i].params.top_k <= _FEW < vocab]
    for members, width in ((few, _FEW), (sorted({*drawn} - {*few}), vocab)):
        group = max(1, _GROUP_ELEMENTS // width)
        for at in range(0, len(members), group):
            chosen = members[at : at + group]
            index = on_device(chosen, torch.int64, adjusted.device)
            some = adjusted.index_select(0, index)
            ordered, ids = _largest(some) if width < vocab else _sorted(some)
            picked = _pick(ordered, ids, vocab, [rows[i] for i in chosen])
            token_ids.index_copy_(0, index, picked)


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


def _adjust(raw: torch.Tensor, rows: Sequence[SamplingRow], changed: Sequence[int]) -> torch.Tensor:
    """Penalties, bias and forbidden ids; `raw` itself where no row asks for any."""
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
        logits.index_fill_(0, _id_tensor(row.forbidden_ids, logits), -torch.inf)


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
    # Rounding must not land beyond the last token that was kept; of a non-finite row none was.
    last = (probs > 0).sum(dim=-1, keepdim=True) - 1
    return ids.gather(1, place.minimum(last).clamp(min=0)).squeeze(1)


class _Logprobs:
    """Of one token a row, and of as many of the most likely as stand beside it: on their way to the host."""

    def __init__(
        self, logits: torch.Tensor, token_ids: torch.Tensor, counts: Sequence[int]
    ) -> None:
        """logits [num_rows, vocab]; token_ids [num_rows] int64; counts: of the most likely, one a row."""
        logprobs = logits.double().log_softmax(dim=-1)
        top = logprobs.topk(min(max(counts), logprobs.shape[-1]))
        own = logprobs.gather(1, token_ids.unsqueeze(1))
        ranks = (logprobs > own).sum(dim=-1)
        self._counts = counts
        parts = (token_ids, own.squeeze(1), ranks, top.values, top.indices)
        self._parts = [HostCopy(part) for part in parts]

    def results(self) -> list[PositionLogprobs]:
        found = []
        rows = zip(*(part.tolist() for part in self._parts), self._counts, strict=True)
        for token_id, logprob, rank, values, ids, count in rows:
            pairs = zip(ids[:count], values[:count], strict=True)
            top = tuple(TokenLogprob(*pair, place) for place, pair in enumerate(pairs, start=1))
            found.append(PositionLogprobs(TokenLogprob(token_id, logprob, rank + 1), top))
        return found


def _mix(value: int) -> int:
    value = (value + _GOLDEN) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)
