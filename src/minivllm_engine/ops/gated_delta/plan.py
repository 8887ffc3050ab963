"""How the sequences of a step are laid out for the delta rule: the same for all DeltaNet layers."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

import torch

Begin = Literal["empty", "slot", "carried"]

CHUNK = 64
_GRAIN = 8
# Steps that are worked on together: bounds the scratch memory, whatever the length of a prompt.
_MAX_STEPS = 1024


@dataclass(frozen=True, slots=True)
class Part:
    """Sequences whose next tokens are laid out as `shape` (sequences, chunks, steps of a chunk).

    Attributes:
        begin: "empty" where all of the sequences begin here, so that their state is zero; "slot" where
            it lies in their slots; "carried" where the one sequence is that of the part before.
        slots: [shape[0]], of the sequences.
        rows: the row of the packed batch that each place of the flattened layout takes; where there is
            none, any row of the same sequence.
        padding: the places where there is none.
        places: the others, and
        tokens: their rows.
    """

    shape: tuple[int, int, int]
    begin: Begin
    slots: torch.Tensor
    rows: torch.Tensor
    padding: torch.Tensor
    places: torch.Tensor
    tokens: torch.Tensor


@dataclass(frozen=True, slots=True)
class ReferenceChunkPlan:
    """How packed sequences are cut into chunks.

    A sequence of more than one chunk goes alone, a bounded number of chunks at a time. Shorter ones
    go together, each padded to the next multiple of 8.
    """

    parts: tuple[Part, ...]

    @classmethod
    def build(
        cls, slots: torch.Tensor, starts: tuple[int, ...], lengths: tuple[int, ...]
    ) -> "ReferenceChunkPlan":
        """Plan the next tokens of some sequences.

        Args:
            slots: [num_seqs], no two alike.
            starts: tokens of each sequence that its state has seen. 0 means that its state is zero.
            lengths: tokens of each, in the order of the rows.
        """
        parts = []
        short: defaultdict[tuple[int, Begin], list[tuple[int, int, int]]] = defaultdict(list)
        row = 0
        for seq, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            begin: Begin = "slot" if start else "empty"
            if length <= CHUNK:
                size = -(-length // _GRAIN) * _GRAIN
                short[size, begin].append((seq, row, length))
            else:
                for done in range(0, length, _MAX_STEPS):
                    some = (seq, row + done, min(length - done, _MAX_STEPS))
                    parts.append(_part([some], CHUNK, slots, "carried" if done else begin))
            row += length
        for (size, begin), members in short.items():
            batch = _MAX_STEPS // size
            parts += [
                _part(members[first : first + batch], size, slots, begin)
                for first in range(0, len(members), batch)
            ]
        return cls(tuple(parts))


def _part(
    members: list[tuple[int, int, int]], size: int, slots: torch.Tensor, begin: Begin
) -> Part:
    """members: (sequence, first row, length), in chunks of `size` steps."""
    num_chunks = -(-max(length for _, _, length in members) // size)
    steps = torch.arange(num_chunks * size)
    first_rows = torch.tensor([row for _, row, _ in members]).unsqueeze(1)
    lengths = torch.tensor([length for _, _, length in members]).unsqueeze(1)
    rows = (first_rows + torch.minimum(steps, lengths - 1)).flatten()
    real = (steps < lengths).flatten()
    places = real.nonzero().squeeze(1)
    return Part(
        (len(members), num_chunks, size),
        begin,
        slots[[seq for seq, _, _ in members]],
        rows.to(slots.device),
        real.logical_not().nonzero().squeeze(1).to(slots.device),
        places.to(slots.device),
        rows[places].to(slots.device),
    )


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """Where the states of decoding sequences lie.

    Attributes:
        slots: [N].
        fresh: the slots of sequences that begin here, or None: their state is zero.
        span: the first and last slot of a range that holds them all, and no more others than them;
            None where they lie wider apart.
        places: [N], where in that range each sequence's slot is; None where they fill it in order.
    """

    slots: torch.Tensor
    fresh: torch.Tensor | None
    span: tuple[int, int] | None
    places: torch.Tensor | None

    @classmethod
    def build(cls, slots: torch.Tensor, starts: tuple[int, ...]) -> "SlotPlan":
        """Plan a step of slots [N], no two alike, whose states have seen `starts` tokens each."""
        fresh = [i for i, start in enumerate(starts) if start == 0]
        ids = slots.tolist()
        first, last = min(ids), max(ids) + 1
        return cls(
            slots=slots,
            fresh=slots[fresh] if fresh else None,
            span=(first, last) if last - first <= 2 * len(ids) else None,
            places=None if ids == list(range(first, last)) else slots - first,
        )
