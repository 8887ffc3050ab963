"""Causal depthwise convolution followed by SiLU, over packed sequences, with history by slot.

Shapes: D channels, W weights a channel, at least 2; the pool is [num_slots, D, W - 1], the last raw
inputs, oldest first. Tap W - 1 multiplies the current token. Sums are taken in fp32 and rounded once. Shifted
multiply-adds throughout: torch's grouped `conv1d` is slow on CPUs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from minivllm_engine.tensors.device_copy import cast, fp32


@dataclass(frozen=True, slots=True)
class ReferenceConvPlan:
    """Rows of packed sequences once each has its W - 1 rows of history in front of it.

    Attributes:
        slots: [num_seqs], no two alike.
        fresh: which of the sequences begin here, so that their history is zero.
        num_rows: rows of that buffer.
        history: [num_seqs * (W - 1)], the rows of the sequences' histories.
        tokens: [num_tokens].
        outputs: [num_tokens], where a window of W rows begins that ends with the token.
        tails: [num_seqs * (W - 1)], the last rows of each sequence: the next step's history.
    """

    slots: torch.Tensor
    fresh: torch.Tensor
    num_rows: int
    history: torch.Tensor
    tokens: torch.Tensor
    outputs: torch.Tensor
    tails: torch.Tensor

    @classmethod
    def build(
        cls,
        slots: torch.Tensor,
        starts: tuple[int, ...],
        lengths: tuple[int, ...],
        conv_width: int,
    ) -> "ReferenceConvPlan":
        """Plan the next tokens of some sequences.

        Args:
            slots: [num_seqs], no two alike.
            starts: tokens of each sequence that came before. 0 means that its history is zero.
            lengths: tokens of each, in the order of the rows.
            conv_width: W.
        """
        carried = conv_width - 1
        history, tokens, tails = [], [], []
        row = 0
        for length in lengths:
            end = row + carried + length
            history.append(torch.arange(row, row + carried))
            tokens.append(torch.arange(row + carried, end))
            tails.append(torch.arange(end - carried, end))
            row = end
        history_rows, token_rows, tail_rows = (
            torch.cat(rows).to(slots.device) for rows in (history, tokens, tails)
        )
        fresh = torch.tensor([i for i, start in enumerate(starts) if start == 0], dtype=torch.long)
        return cls(
            slots,
            fresh.to(slots.device),
            row,
            history_rows,
            token_rows,
            token_rows - carried,
            tail_rows,
        )


def causal_conv_prefill(
    x: torch.Tensor,
    pool: torch.Tensor,
    conv_weight: Sequence[torch.Tensor],
    plan: ReferenceConvPlan,
) -> torch.Tensor:
    """Convolve packed sequences; their history in `pool` moves on to their ends.

    Args:
        x: [num_tokens, D], raw inputs.
        pool: [num_slots, D, W - 1].
        conv_weight: W of [D], fp32.
        plan: made for these sequences.

    Returns:
        [num_tokens, D] after SiLU.
    """
    carried, channels = pool.shape[2], pool.shape[1]
    rows = x.new_empty(plan.num_rows, channels)
    history = pool.index_select(0, plan.slots).index_fill_(0, plan.fresh, 0).transpose(1, 2)
    rows.index_copy_(0, plan.history, history.reshape(-1, channels))
    rows.index_copy_(0, plan.tokens, x)
    wide = fp32(rows)
    total = wide[carried:] * conv_weight[-1]
    for i in range(carried):
        total.addcmul_(wide[i : i + total.shape[0]], conv_weight[i])
    tails = rows.index_select(0, plan.tails).view(-1, carried, channels)
    pool.index_copy_(0, plan.slots, tails.transpose(1, 2))
    return F.silu(cast(total.index_select(0, plan.outputs), x.dtype), inplace=True)


def causal_conv_step(
    x: torch.Tensor, pool: torch.Tensor, conv_weight: Sequence[torch.Tensor], slots: torch.Tensor
) -> torch.Tensor:
    """Take one token for each of N sequences; their history in `pool` moves on by one.

    Args:
        x: [N, D], raw inputs.
        pool: [num_slots, D, W - 1].
        conv_weight: W of [D], fp32.
        slots: [N], no two alike.

    Returns:
        [N, D] after SiLU.
    """
    history = pool.index_select(0, slots)
    total = x * conv_weight[-1]
    for column, tap in zip(fp32(history).unbind(-1), conv_weight, strict=False):
        total.addcmul_(column, tap)
    # Rolled over the flattened channels, which is one contiguous copy, the oldest input of a channel
    # lands where the newest of the one before it belongs, and is overwritten.
    moved = history.flatten(1).roll(-1, 1).view_as(history)
    moved.select(-1, -1).copy_(x)
    pool.index_copy_(0, slots, moved)
    return F.silu(cast(total, x.dtype), inplace=True)
