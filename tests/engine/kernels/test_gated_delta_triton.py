"""The kernels of the gated delta rule against the reference, in Triton's interpreter."""

import pytest
import torch

from support.kernel_checks import needs_interpreter
from support.kernel_checks.gated_delta import (
    Heads,
    check_gates,
    check_order_of_lanes,
    check_recurrent,
    check_recurrent_is_steps,
    check_states,
    check_steps,
)

pytestmark = needs_interpreter

CPU = torch.device("cpu")
HEADS = {
    "ratio_1": Heads(2, 2, 16, 16),
    "ratio_2_wide_keys": Heads(2, 4, 32, 12),
    "ratio_3_wide_values": Heads(1, 3, 24, 40),
    "one_row": Heads(1, 1, 8, 1),
}


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_d1_steps_equal_the_reference_and_touch_no_other_state(heads: Heads) -> None:
    check_steps(CPU, torch.float32, heads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_steps_in_half_precision(dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    check_steps(CPU, dtype, Heads(1, 2, 20, 12), state_dtype=state_dtype, num_seqs=3)


def test_largest_heads() -> None:
    check_steps(CPU, torch.float32, Heads(1, 1, 256, 256), num_seqs=2, num_steps=1)


def test_a_sequence_has_the_same_bits_wherever_it_stands() -> None:
    check_order_of_lanes(CPU, torch.float32, Heads(1, 2, 16, 12))


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_short_chunks_equal_the_reference_and_touch_no_other_state(heads: Heads) -> None:
    check_recurrent(CPU, torch.float32, heads, [(0, 1), (7, 1), (0, 13), (64, 3), (1, 2)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_short_chunks_in_half_precision(dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    heads = Heads(1, 2, 20, 12)
    check_recurrent(CPU, dtype, heads, [(0, 5), (3, 9)], state_dtype=state_dtype)


def test_a_chunk_longer_than_those_of_the_reference() -> None:
    check_recurrent(CPU, torch.float32, Heads(1, 1, 16, 8), [(12, 70)])


def test_a_chunk_has_the_same_bits_wherever_it_is_cut() -> None:
    check_recurrent_is_steps(CPU, torch.float32, Heads(1, 2, 16, 12))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gates_of_a_prefill_are_those_of_a_step(dtype: torch.dtype) -> None:
    for num_tokens, num_heads in [(1, 3), (65, 6), (200, 16)]:
        check_gates(CPU, dtype, num_tokens, num_heads)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_states_go_out_of_their_slots_and_back(state_dtype: torch.dtype) -> None:
    check_states(CPU, state_dtype)
