"""Causal depthwise convolution followed by SiLU, over packed sequences, with history by slot.

Shapes: D channels, W taps, at least 2; the pool is [num_slots, D, W - 1], the last raw inputs, oldest
first. Tap W - 1 multiplies the current token. Sums are taken in fp32 and rounded once. Shifted
multiply-adds throughout: torch's grouped `conv1d` is slow on CPUs.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True)
class ConvPlan:
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
        num_taps: int,
    ) -> "ConvPlan":
        """Plan the next tokens of some sequences.

        Args:
            slots: [num_seqs], no two alike.
            starts: tokens of each sequence that came before. 0 means that its history is zero.
            lengths: tokens of each, in the order of the rows.
            num_taps: W.
        """
        carried = num_taps - 1
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
    x: torch.Tensor, pool: torch.Tensor, weight: torch.Tensor, plan: ConvPlan
) -> torch.Tensor:
    """Convolve packed sequences; their history in `pool` moves on to their ends.

    Args:
        x: [num_tokens, D], raw inputs.
        pool: [num_slots, D, W - 1].
        weight: [W, D].
        plan: made for these sequences.

    Returns:
        [num_tokens, D] after SiLU.
    """
    num_taps, channels = weight.shape
    rows = x.new_empty(plan.num_rows, channels)
    history = pool.index_select(0, plan.slots).index_fill_(0, plan.fresh, 0).transpose(1, 2)
    rows.index_copy_(0, plan.history, history.reshape(-1, channels))
    rows.index_copy_(0, plan.tokens, x)
    wide, weight = rows.float(), weight.float()
    total = wide[num_taps - 1 :] * weight[-1]
    for tap in range(num_taps - 1):
        total.addcmul_(wide[tap : tap + total.shape[0]], weight[tap])
    tails = rows.index_select(0, plan.tails).view(-1, num_taps - 1, channels)
    pool.index_copy_(0, plan.slots, tails.transpose(1, 2))
    return F.silu(total.index_select(0, plan.outputs).to(x.dtype), inplace=True)


def causal_conv_step(
    x: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """One token for each of N sequences; their history in `pool` moves on by one.

    Args:
        x: [N, D], raw inputs.
        pool: [num_slots, D, W - 1].
        slots: [N], no two alike.
        weight: [W, D].

    Returns:
        [N, D] after SiLU.
    """
    history = pool.index_select(0, slots)
    wide, weight = history.float(), weight.float()
    total = x * weight[-1]
    for column, tap in zip(wide.unbind(-1), weight, strict=False):
        total.addcmul_(column, tap)
    moved = torch.empty_like(history)
    # One copy for all: shifted by one over the flattened channels, the oldest input of a channel lands
    # where the newest of the one before it belongs, and is overwritten.
    moved.flatten(1)[:, :-1] = history.flatten(1)[:, 1:]
    moved[..., -1] = x
    pool.index_copy_(0, slots, moved)
    return F.silu(total.to(x.dtype), inplace=True)
