"""How the sequences of a step are laid out for the delta rule: the same for all DeltaNet layers."""

import itertools
from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

import torch

Begin = Literal["empty", "slot", "carried"]

CHUNK = 64
_MIN_CHUNK = 16
# Steps that are worked on together: bounds the scratch memory, whatever the length of a prompt.
_MAX_STEPS = 1024


@dataclass(frozen=True, slots=True)
class Part:
    """Sequences whose next tokens are laid out as `shape` (sequences, chunks, steps of a chunk).

    Attributes:
        begin: "empty" where all of the sequences begin here, so that their state is zero; "slot" where
            it lies in their slots; "carried" where the one sequence is that of the part before.
        slots: [shape[0]], of the sequences.
        tokens: [num_tokens], rows of the packed batch.
        places: [num_tokens], where in the flattened layout each of them goes; the rest is padding.
    """

    shape: tuple[int, int, int]
    begin: Begin
    slots: torch.Tensor
    tokens: torch.Tensor
    places: torch.Tensor


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """How packed sequences are cut into chunks.

    A sequence of more than one chunk goes alone, a bounded number of chunks at a time. Shorter ones
    go together, each padded to a power of two that depends on its own length only.
    """

    parts: tuple[Part, ...]

    @classmethod
    def build(
        cls, slots: torch.Tensor, starts: tuple[int, ...], lengths: tuple[int, ...]
    ) -> "ChunkPlan":
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
                size = max(_MIN_CHUNK, 1 << (length - 1).bit_length())
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
    tokens = [torch.arange(row, row + length) for _, row, length in members]
    places = [
        torch.arange(i * num_chunks * size, i * num_chunks * size + length)
        for i, (_, _, length) in enumerate(members)
    ]
    return Part(
        (len(members), num_chunks, size),
        begin,
        slots[[seq for seq, _, _ in members]],
        torch.cat(tokens).to(slots.device),
        torch.cat(places).to(slots.device),
    )


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """Where the states of decoding sequences lie.

    Attributes:
        slots: [N].
        fresh: the slots of sequences that begin here, or None: their state is zero.
        order: [N], the sequences by ascending slot, or None where they are in that order.
        back: [N], the inverse of order.
        runs: (first slot, first and last sequence in that order) of slots that follow one another.
    """

    slots: torch.Tensor
    fresh: torch.Tensor | None
    order: torch.Tensor | None
    back: torch.Tensor | None
    runs: tuple[tuple[int, int, int], ...]

    @classmethod
    def build(cls, slots: torch.Tensor, starts: tuple[int, ...]) -> "SlotPlan":
        """slots: [N], no two alike; starts: tokens of each sequence that its state has seen."""
        fresh = [i for i, start in enumerate(starts) if start == 0]
        fresh_slots = slots[fresh] if fresh else None
        ordered, order = slots.sort()
        ids = ordered.tolist()
        cuts = [0, *(i for i in range(1, len(ids)) if ids[i] != ids[i - 1] + 1), len(ids)]
        runs = tuple((ids[a], a, b) for a, b in itertools.pairwise(cuts) if a < b)
        if torch.equal(ordered, slots):
            return cls(slots, fresh_slots, None, None, runs)
        return cls(slots, fresh_slots, order, order.argsort(), runs)
