"""Logits to token ids. What a row gets depends on its own logits, parameters and counters alone.

All of it are torch operations on the logits' device, of which none waits for it before
`SampleHandle.results`.
Whoever draws from logits may overwrite them as soon as `draw` has returned.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from minivllm_engine.core.outputs import PositionLogprobs, TokenLogprob
from minivllm_engine.ops.sampling.race import (
    ROW,
    UNIT,
    RaceRows,
    key_base,
    likelihoods,
    race,
    row_keys,
)
from minivllm_engine.ops.sampling.reference import greedy
from minivllm_engine.runner.logit_edits import LogitEdits, SamplingRow, needs_edits
from minivllm_engine.tensors.device_copy import HostCopy, on_device

Greedy = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

Race = Callable[[torch.Tensor, torch.Tensor, RaceRows], torch.Tensor]
Likelihoods = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, int],
    tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
]

# Rows are taken in groups of at most this many logits, where many numbers of each are needed.
_GROUP_ELEMENTS = 8 * 2**20
_key_base = functools.lru_cache(maxsize=4096)(key_base)


class Sampled(NamedTuple):
    """One row's result. `token_id` is None where the logits are non-finite, or all equal."""

    token_id: int | None
    logprobs: PositionLogprobs | None = None


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
        best, alive = greedy(logits)
        counts = [count for _, count in some]
        reports = _Logprobs(logits, best, ids, counts, likelihoods).results()
        results += [r if ok else None for r, ok in zip(reports, alive.tolist(), strict=True)]
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
    race: Race = race,
    likelihoods: Likelihoods = likelihoods,
    argmax: tuple[torch.Tensor, torch.Tensor] | None = None,
    edits: LogitEdits | None = None,
) -> SampleHandle:
    """Queue the drawing of one token a row on the device of the logits.

    Args:
        logits: [num_rows, vocab], any float dtype; not modified.
        rows: one entry a row.
        greedy, race, likelihoods: find the largest logit of each row, draw from some rows, and say how
            likely tokens are; see ops/sampling.
        argmax: what `greedy` gives for these logits, if that is known.
        edits: what is known of the rows' owners from tokens before; must have their slots.
    """
    best, alive = argmax or greedy(logits)
    token_ids = best
    changed = [i for i, row in enumerate(rows) if needs_edits(row)]
    if changed:
        some = [rows[i] for i in changed]
        if edits is None:
            edits = LogitEdits(len(some), logits.shape[-1], logits.device)
        edited = edits.apply(logits, changed, some)
        own = _drawn(edited.logits, greedy(edited.logits)[0], some, race)
        edited.enter(own)
        token_ids = token_ids.index_copy(0, on_device(changed, torch.int64, logits.device), own)
    if len(changed) < len(rows):
        token_ids = _drawn(logits, best, rows, race, token_ids, frozenset(changed))
    told = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    reports = []
    group = len(told) if logits.is_cuda else max(1, _GROUP_ELEMENTS // logits.shape[-1])
    for at in range(0, len(told), group or 1):
        which = told[at : at + group]
        counts = [rows[i].params.logprobs or 0 for i in which]
        own, own_best, tokens = logits, best, token_ids
        if len(which) < len(rows):
            index = on_device(which, torch.int64, logits.device)
            own, own_best, tokens = (x.index_select(0, index) for x in (logits, best, token_ids))
        reports.append((which, _Logprobs(own, own_best, tokens, counts, likelihoods)))
    return SampleHandle(token_ids, alive, reports)


def _drawn(
    logits: torch.Tensor,
    best: torch.Tensor,
    rows: Sequence[SamplingRow],
    race: Race,
    token_ids: torch.Tensor | None = None,
    done: frozenset[int] = frozenset(),
) -> torch.Tensor:
    """The tokens of the rows: drawn, unless `done`, or those of `token_ids` (or else the best)."""
    if token_ids is None:
        token_ids = best
    drawn = [i for i, row in enumerate(rows) if row.params.temperature and i not in done]
    vocab = logits.shape[-1]
    # Plain PyTorch needs memory for many numbers of each logit.
    group = len(drawn) if logits.is_cuda else max(1, _GROUP_ELEMENTS // vocab)
    for at in range(0, len(drawn), group or 1):
        some = drawn[at : at + group]
        params = [rows[i].params for i in some]
        keys = row_keys(
            [_key_base(rows[i].params.seed, rows[i].index) for i in some],
            [rows[i].position for i in some],
        )
        race_rows = RaceRows.build(
            some,
            keys,
            [p.temperature for p in params],
            [p.min_p for p in params],
            [p.top_p for p in params],
            [p.top_k for p in params],
            vocab=vocab,
            device=logits.device,
        )
        tokens = race(logits, best, race_rows)
        token_ids = token_ids.index_copy(0, race_rows.numbers[:, ROW].long(), tokens)
    return token_ids


class _Logprobs:
    """Of one token a row, and of as many of the most likely as stand beside it: on their way to the host."""

    def __init__(
        self,
        logits: torch.Tensor,
        best: torch.Tensor,
        token_ids: torch.Tensor,
        counts: Sequence[int],
        likelihoods: Likelihoods,
    ) -> None:
        """logits [num_rows, vocab]; best, token_ids [num_rows]; counts: of the most likely, one a row."""
        most = min(max(counts), logits.shape[-1])
        sums, ranks, values, ids = likelihoods(logits, best, token_ids, most)
        largest = logits.gather(1, best[:, None]).double()
        total = largest + (sums[:, None].double() / UNIT).log()
        own = logits.gather(1, token_ids[:, None]).double() - total
        parts = (token_ids, own.squeeze(1), ranks, values.double() - total, ids)
        self._counts = counts
        self._parts = [HostCopy(part) for part in parts]

    def results(self) -> list[PositionLogprobs]:
        found = []
        rows = zip(*(part.tolist() for part in self._parts), self._counts, strict=True)
        for token_id, logprob, rank, values, ids, count in rows:
            pairs = zip(ids[:count], values[:count], strict=True)
            top = tuple(TokenLogprob(*pair, place) for place, pair in enumerate(pairs, start=1))
            found.append(PositionLogprobs(TokenLogprob(token_id, logprob, rank + 1), top))
        return found
