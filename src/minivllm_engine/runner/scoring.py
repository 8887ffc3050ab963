"""Logprobs of tokens that are known: of continuations, and of the prompt itself, from hidden states.

Rows are taken in groups: their logits are never all there. Nothing here waits for the device before
`ScoreHandle.results`, but for the logprobs of prompts.
"""

from collections.abc import Callable, Sequence

import torch

from minivllm_engine.core.outputs import PositionLogprobs, RowScore
from minivllm_engine.ops.sampling.reference import greedy
from minivllm_engine.runner.sampler import score
from minivllm_engine.scheduling.scheduled_batch import ScheduledBatch
from minivllm_engine.tensors.device_copy import HostCopy, on_device

# Rows are scored in groups of at most this many float64 values.
_GROUP_ELEMENTS = 8 * 2**20

RowResult = PositionLogprobs | RowScore | None
LogitsOf = Callable[[torch.Tensor], torch.Tensor]


class ScoreHandle:
    """Scores of a step's rows that may still be on their way."""

    def __init__(self, num_rows: int = 0) -> None:
        self._results: list[RowResult] = [None] * num_rows
        self._groups: list[tuple[Sequence[int], Sequence[Sequence[int]], HostCopy, HostCopy]] = []

    def set(self, row: int, result: RowResult) -> None:
        """Note what is known of a row."""
        self._results[row] = result

    def add_group(
        self,
        rows: Sequence[int],
        wanted: Sequence[Sequence[int]],
        logits: torch.Tensor,
    ) -> None:
        """Queue the scoring of some rows.

        Args:
            rows: their places among the step's scored rows.
            wanted: the ids whose logprobs are wanted, for each of them.
            logits: [len(rows), vocab_size], any float dtype.
        """
        widest = max(map(len, wanted))
        padded = [[*ids, *[0] * (widest - len(ids))] for ids in wanted]
        flat = [token_id for ids in padded for token_id in ids]
        index = on_device(flat, torch.int64, logits.device).view(len(rows), widest)
        best, alive = greedy(logits)
        # Summed in float64, so that the order in which a device sums does not show in the result.
        total = logits.double().logsumexp(dim=-1, keepdim=True)
        own = (logits.gather(1, index).double() - total).float()
        self._groups.append((rows, wanted, HostCopy(own), HostCopy(best.where(alive, -1))))

    def results(self) -> list[RowResult]:
        """Wait for the scores. One entry a row; None where its logits are non-finite, or all equal."""
        for rows, wanted, own, best in self._groups:
            for row, ids, values, best_id in zip(
                rows, wanted, own.tolist(), best.tolist(), strict=True
            ):
                self._results[row] = (
                    RowScore(tuple(values[: len(ids)]), best_id) if best_id >= 0 else None
                )
        self._groups.clear()
        return self._results


def score_rows(
    hidden: torch.Tensor, batch: ScheduledBatch, logits_of: LogitsOf, vocab_size: int
) -> ScoreHandle:
    """Queue the scoring of all rows of a step that are to be scored.

    Args:
        hidden: [num_scored, hidden_size], in the order of the batch.
        logits_of: makes logits of some of the rows, [_, vocab_size].
    """
    places = [(s.request, position) for s in batch.sequences for position in s.scored]
    handle = ScoreHandle(len(places))
    wanted = [i for i, (request, _) in enumerate(places) if request.targets]
    group = max(16, _GROUP_ELEMENTS // vocab_size)
    for at in range(0, len(wanted), group):
        some = wanted[at : at + group]
        ids = [places[i][0].targets_at(places[i][1]) for i in some]
        handle.add_group(some, ids, logits_of(_rows(hidden, some)))
    prompts = [i for i, (request, _) in enumerate(places) if not request.targets]
    if prompts:
        tokens = [
            (request.prompt_ids[position + 1], request.params.prompt_logprobs or 0)
            for request, position in (places[i] for i in prompts)
        ]
        found = score(_rows(hidden, prompts), tokens, logits_of, vocab_size)
        for i, result in zip(prompts, found, strict=True):
            handle.set(i, result)
    return handle


def _rows(hidden: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    if len(rows) == len(hidden):
        return hidden
    return hidden.index_select(0, on_device(list(rows), torch.int64, hidden.device))
