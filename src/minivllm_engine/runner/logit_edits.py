"""Penalties, biases and forbidden ids: what of a row's logits is changed, kept on the device by slot.

A request's list has an entry for each id that is touched: how often the output has it, its bias, whether
it may be forbidden. A token that was drawn is entered where it was drawn, so nobody waits to learn which it
was. Lists are made anew from what the host knows whenever they are not those of the row's own position.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from minivllm_engine.core.sampling_params import ResolvedSampling
from minivllm_engine.tensors.device_copy import on_device

# Columns beside the vocabulary, so that rows stay aligned. Entries that are none point to the first.
_SPARE = 8
_NEVER = -1
_GRAIN = 64


class Mask(Protocol):
    """Says which ids may be sampled: a bit an id, from the lowest of each byte on."""

    num_bytes: int

    def fill(self, address: int) -> None:
        """Write `num_bytes` bytes, a multiple of 4."""


@dataclass(slots=True)
class SamplingRow:
    """What decides one row's token beside its logits.

    Attributes:
        index: number of the output among the request's `n`.
        position: absolute position of the token to be sampled.
        prompt_ids, output_ids: known tokens, for the penalties.
        forbidden_ids: ids that cannot be sampled now (end ids before `min_tokens`).
        allowed: says which ids can be; None: all others.
        slot: of the request's own while it runs.
        owner: the request; None: nothing is kept from one token to the next.
    """

    params: ResolvedSampling
    index: int
    position: int
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    forbidden_ids: Sequence[int] = ()
    allowed: Mask | None = None
    slot: int = 0
    owner: object = None


def is_penalised(params: ResolvedSampling) -> bool:
    """Do the tokens so far decide what may be sampled next?"""
    return bool(
        params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
    )


def needs_edits(row: SamplingRow) -> bool:
    """Say whether the row is sampled from other logits than the model's."""
    changed = row.forbidden_ids or row.allowed is not None
    return bool(changed or row.params.logit_bias or is_penalised(row.params))


def forbid(logits: torch.Tensor, masks: Sequence[Mask | None]) -> None:
    """Set logits to -inf, in place, where a row's mask does not allow an id. Queues only.

    Args:
        logits: [num_rows, vocab] fp32, rows may lie apart.
        masks: one a row; None allows all.
    """
    found = [(row, mask) for row, mask in enumerate(masks) if mask is not None]
    if not found:
        return
    device, vocab = logits.device, logits.shape[-1]
    num_words = max(mask.num_bytes for _, mask in found) // 4
    shape = (len(found), num_words)
    words = torch.empty(shape, dtype=torch.int32, pin_memory=device.type == "cuda")
    for place, (_, mask) in enumerate(found):
        mask.fill(words[place].data_ptr())
    words = words.to(device, non_blocking=True)
    ids = torch.arange(vocab, device=device)
    allowed = (words.index_select(1, ids >> 5) >> (ids & 31).int()) & 1
    index = on_device([row for row, _ in found], torch.int64, device)
    some = logits.index_select(0, index).masked_fill(allowed == 0, -torch.inf)
    logits.index_copy_(0, index, some)


class LogitEdits:
    """The lists of up to `num_slots` requests on a device. Costs memory once somebody needs it."""

    def __init__(self, num_slots: int, vocab: int, device: torch.device) -> None:
        self._num_slots, self._vocab, self._device = num_slots, vocab, device
        # Whose list a slot has, and the position for which it is right.
        self._holds: list[tuple[object, int]] = [(None, 0)] * num_slots
        self._sizes = [0] * num_slots  # at most
        self._capacity = 0
        self._grow(0)

    def _grow(self, width: int) -> None:
        """Make room for lists of `width` entries, and keep what there is."""
        old, capacity = self._capacity, -(-width // _GRAIN) * _GRAIN
        shape = (self._num_slots if width else 0, capacity)

        def longer(name: str, value: float, dtype: torch.dtype) -> None:
            tensor = torch.full(shape, value, dtype=dtype, device=self._device)
            if old:
                tensor[:, :old] = getattr(self, name)
            setattr(self, name, tensor)

        longer("_ids", self._vocab, torch.int64)
        longer("_counts", _NEVER, torch.int32)
        longer("_biases", 0, torch.float32)
        longer("_forbidden", 0, torch.bool)
        if not old:
            self._used = torch.zeros(shape[0], dtype=torch.int64, device=self._device)
        self._capacity = capacity

    def apply(
        self, logits: torch.Tensor, rows: Sequence[int], what: Sequence[SamplingRow]
    ) -> "Edited":
        """Copy some rows of the logits and edit the copies. Queues only.

        Args:
            rows: which; `what` has as many.
        """
        slots = [row.slot if row.owner is not None else i for i, row in enumerate(what)]
        stale = [i for i, row in enumerate(what) if not self._is_current(row, slots[i])]
        longest = 0
        if stale:
            longest = self._load([slots[i] for i in stale], [what[i] for i in stale])
        tracked = [is_penalised(row.params) for row in what]
        for slot, grows in zip(slots, tracked, strict=True):
            self._holds[slot] = (None, 0)  # until the token is entered
            self._sizes[slot] += grows
        width = max(longest, *(self._sizes[slot] for slot in slots))
        if width > self._capacity:
            self._grow(max(width, 2 * self._capacity))
        numbers = np.array([_numbers(*entry) for entry in zip(rows, slots, what, strict=True)])
        packed = on_device(numbers.ravel(), torch.float64, self._device).view(-1, 7)
        places = packed[:, :2].long()
        index = places[:, 1]
        vocab = self._vocab
        edited = torch.empty(len(rows), vocab + _SPARE, device=self._device)
        edited[:, :vocab] = logits.index_select(0, places[:, 0])
        edited[:, vocab:] = 0
        ids = self._ids[:, :width].index_select(0, index)
        counts = self._counts[:, :width].index_select(0, index)
        factor, divisor, presence, frequency, forbids = packed[:, 2:].float().unsqueeze(2).unbind(1)
        values = edited.gather(1, ids)
        repeated = torch.where(values > 0, values * divisor, values * factor)
        values = torch.where(counts >= 0, repeated, values)
        penalty = frequency * counts + presence
        values = torch.where(counts > 0, values - penalty, values)
        values = values + self._biases[:, :width].index_select(0, index)
        forbidden = self._forbidden[:, :width].index_select(0, index) & (forbids > 0)
        values = values.masked_fill(forbidden, -torch.inf)
        edited.scatter_(1, ids, values)
        forbid(edited[:, :vocab], [row.allowed for row in what])
        return Edited(self, edited[:, :vocab], what, slots, tracked, (index, ids, counts))

    def _is_current(self, row: SamplingRow, slot: int) -> bool:
        owner, position = self._holds[slot]
        return row.owner is not None and owner is row.owner and position == row.position

    def _load(self, slots: Sequence[int], what: Sequence[SamplingRow]) -> int:
        """Make lists anew from the tokens that the host knows. Returns the longest list's length."""
        lists = [_entries(row) for row in what]
        longest = max(len(entries) for entries in lists)
        if longest + 1 > self._capacity:
            self._grow(max(longest + 1, self._capacity))
        wide = np.zeros((4, len(lists), self._capacity))
        wide[0], wide[1] = self._vocab, _NEVER
        for i, entries in enumerate(lists):
            if entries:
                wide[:, i, : len(entries)] = np.array(entries).T
        for slot, entries in zip(slots, lists, strict=True):
            self._sizes[slot] = len(entries)
        index = on_device(slots, torch.int64, self._device)
        sizes = on_device([len(entries) for entries in lists], torch.int64, self._device)
        new = on_device(wide.ravel(), torch.float64, self._device).view(wide.shape)
        self._ids.index_copy_(0, index, new[0].long())
        self._counts.index_copy_(0, index, new[1].int())
        self._biases.index_copy_(0, index, new[2].float())
        self._forbidden.index_copy_(0, index, new[3] > 0)
        self._used.index_copy_(0, index, sizes)
        return longest

    _ids: torch.Tensor
    _counts: torch.Tensor
    _biases: torch.Tensor
    _forbidden: torch.Tensor


class Edited:
    """Logits of some rows as they are sampled from.

    Attributes:
        logits: [num_rows, vocab] fp32.
    """

    def __init__(
        self,
        edits: LogitEdits,
        logits: torch.Tensor,
        what: Sequence[SamplingRow],
        slots: Sequence[int],
        tracked: Sequence[bool],
        found: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> None:
        self.logits = logits
        self._edits, self._what, self._slots, self._tracked = edits, what, slots, tracked
        self._found = found

    def enter(self, token_ids: torch.Tensor) -> None:
        """Count the tokens that were drawn from these rows, [num_rows] int64. Queues only."""
        edits, (index, ids, counts) = self._edits, self._found
        if any(self._tracked):
            if not all(self._tracked):
                some = [i for i, is_tracked in enumerate(self._tracked) if is_tracked]
                chosen = on_device(some, torch.int64, token_ids.device)
                index, ids, counts, token_ids = (
                    tensor.index_select(0, chosen) for tensor in (index, ids, counts, token_ids)
                )
            hit = ids == token_ids[:, None]
            is_known, at = hit.max(dim=1)
            used = edits._used.index_select(0, index)
            place = torch.where(is_known, at, used)
            before = counts.gather(1, place[:, None]).squeeze(1)
            edits._ids.index_put_((index, place), token_ids)
            edits._counts.index_put_((index, place), before.clamp(min=0) + 1)
            edits._used.index_copy_(0, index, used + ~is_known)
        for slot, row in zip(self._slots, self._what, strict=True):
            edits._holds[slot] = (row.owner, row.position + 1)


def _numbers(place: int, slot: int, row: SamplingRow) -> tuple[float, ...]:
    p = row.params
    penalties = (p.presence_penalty, p.frequency_penalty, float(bool(row.forbidden_ids)))
    return (place, slot, p.repetition_penalty, 1 / p.repetition_penalty, *penalties)


def _entries(row: SamplingRow) -> list[tuple[int, int, float, bool]]:
    """Id, occurrences in the output (-1: neither there nor in the prompt), bias, forbidden."""
    occurrences: dict[int, int] = {}
    if is_penalised(row.params):
        occurrences = {**dict.fromkeys(row.prompt_ids, 0), **Counter(row.output_ids)}
    bias, forbidden = row.params.logit_bias, frozenset(row.forbidden_ids)
    ids = dict.fromkeys([*occurrences, *bias, *forbidden])
    return [(i, occurrences.get(i, _NEVER), bias.get(i, 0.0), i in forbidden) for i in ids]
