"""What the adapter hands to FLA and takes from it: with a stand-in, since FLA itself needs a card."""

import sys

import pytest
import torch

from minivllm_engine.core.errors import BackendUnavailable
from minivllm_engine.ops.gated_delta import fla, reference
from minivllm_engine.ops.gated_delta.plan import ReferenceChunkPlan
from minivllm_engine.ops.prompt_buffers import Bucket, PromptBuffers
from support import fla_stand_in
from support.delta_rule import l2norm, recurrent_delta_rule
from support.kernel_checks.gated_delta import Heads, check_steps, gates
from support.prompt_steps import write_step

NAN = float("nan")
SLOTS, STARTS, LENGTHS = torch.tensor([5, 0, 3]), (0, 64, 7), (65, 1, 30)


def stand_in_step(
    q,
    k,
    v,
    g=None,
    gk=None,
    gv=None,
    beta=None,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False,
    A_log=None,
    dt_bias=None,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
    state_v_first=False,
    cu_seqlens=None,
    **kwargs,
):
    """`fused_recurrent_gated_delta_rule` of FLA 0.6.0 over batches of sequences of equal length."""
    assert use_qk_l2norm_in_kernel and state_v_first and output_final_state
    assert use_gate_in_kernel and use_beta_sigmoid_in_kernel and not allow_neg_eigval
    assert not kwargs and scale is gk is gv is cu_seqlens is None
    assert initial_state.shape[0] == q.shape[0]
    out, states = torch.empty_like(v), []
    for i, state in enumerate(initial_state.float()):
        decay, strength = gates(g[i], beta[i].float(), A_log, dt_bias)
        qkv = (x[i].float() for x in (q, k, v))
        out[i], final, _ = recurrent_delta_rule(*qkv, decay, strength, state)
        states.append(final)
    return out, torch.stack(states)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    fla_stand_in.install(monkeypatch, stand_in_step)


def inputs(dtype: torch.dtype, num_tokens: int = sum(LENGTHS)) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "q": torch.randn(num_tokens, 2, 16).to(dtype),
        "k": torch.randn(num_tokens, 2, 16).to(dtype),
        "v": torch.randn(num_tokens, 4, 8).to(dtype),
        "g": -torch.rand(num_tokens, 4),
        "beta": torch.rand(num_tokens, 4).to(dtype),
    }


def normed(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With queries and keys as FLA is given them."""
    return {name: l2norm(x) if name in "qk" else x for name, x in given.items()}


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_states_come_from_their_slots_and_go_back_there(state_dtype: torch.dtype) -> None:
    pool = torch.full((7, 4, 8, 16), NAN, dtype=state_dtype)
    pool[SLOTS[1:]] = torch.randn(2, 4, 8, 16).to(state_dtype)
    own, given = pool.clone(), inputs(torch.float32)
    plan = fla.FlaChunkPlan.build(SLOTS, STARTS, LENGTHS)
    out = fla.chunk_gated_delta_rule(**normed(given), pool=own, plan=plan)
    plan = ReferenceChunkPlan.build(SLOTS, STARTS, LENGTHS)
    expected = reference.chunk_gated_delta_rule(**given, pool=pool, plan=plan)
    torch.testing.assert_close(out, expected, rtol=0, atol=5e-6)
    torch.testing.assert_close(own, pool, rtol=1e-2, atol=5e-6, equal_nan=True)


@pytest.mark.usefixtures("stand_in")
def test_a_plan_may_be_refilled_and_have_lanes_and_chunks_of_nobody() -> None:
    """As a graph's is: so nothing of it may be remembered from the step before."""
    bucket = Bucket(256, 4)
    buffers = PromptBuffers(bucket, 4, torch.device("cpu"))
    seen = buffers.bucket(bucket)
    plan = fla.FlaChunkPlan(seen.slots, seen.starts, seen.bounds, seen.chunks, seen.chunk_offsets)
    pool = torch.randn(7, 4, 8, 16)
    for slots, starts, lengths in [
        ((5, 0, 3), (0, 64, 7), (65, 1, 30)),
        ((2,), (128,), (256,)),
        ((1, 4, 6, 0), (0, 0, 64, 3), (64, 64, 63, 2)),
    ]:
        given = inputs(torch.float32, 256)
        for x in given.values():
            x[sum(lengths) :] = NAN
        write_step(buffers, bucket, slots, starts, lengths)
        own, some = pool.clone(), {name: x[: sum(lengths)] for name, x in given.items()}
        out = fla.chunk_gated_delta_rule(**normed(given), pool=own, plan=plan)
        whole = ReferenceChunkPlan.build(torch.tensor(slots), starts, lengths)
        expected = reference.chunk_gated_delta_rule(**some, pool=pool, plan=whole)
        torch.testing.assert_close(out[: sum(lengths)], expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(own, pool, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_d1_steps_equal_the_reference_and_padding_takes_the_sink(
    dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    check_steps(
        torch.device("cpu"),
        dtype,
        Heads(2, 4, 16, 8),
        state_dtype=state_dtype,
        step_rule=fla.gated_delta_step,
        rounds_beta=False,
    )


def test_a_missing_fla_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fla", None)
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", None)
    fla._fla.cache_clear()
    with pytest.raises(BackendUnavailable) as caught:
        fla.FlaChunkPlan.build(SLOTS, STARTS, LENGTHS)
    assert "pip install 'flash-linear-attention" in caught.value.hint
    assert "fla" in caught.value.why
