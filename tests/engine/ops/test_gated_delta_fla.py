"""What the adapter hands to FLA and takes from it: with a stand-in, since FLA itself needs a card."""

import itertools
import sys
from types import ModuleType

import pytest
import torch

from minivllm_engine.core.errors import BackendUnavailable
from minivllm_engine.ops.gated_delta import fla, reference
from minivllm_engine.ops.gated_delta.plan import ReferenceChunkPlan
from support.delta_rule import recurrent_delta_rule
from support.kernel_checks.gated_delta import Heads, check_steps, gates

NAN = float("nan")
SLOTS, STARTS, LENGTHS = torch.tensor([5, 0, 3]), (0, 64, 7), (65, 1, 30)


class StandIn:
    """`chunk_gated_delta_rule` of FLA 0.6.0, computed as its documentation says, that keeps what it got."""

    def __init__(self) -> None:
        self.calls: list[dict[str, torch.Tensor]] = []

    def __call__(
        self,
        q,
        k,
        v,
        g,
        beta,
        scale=None,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
        use_beta_sigmoid_in_kernel=False,
        allow_neg_eigval=False,
        state_v_first=False,
        cu_seqlens=None,
        cu_seqlens_cpu=None,
        chunk_indices=None,
        cp_context=None,
        **kwargs,
    ):
        assert use_qk_l2norm_in_kernel and state_v_first and output_final_state
        assert not kwargs and scale is None and not use_beta_sigmoid_in_kernel
        assert {x.shape[0] for x in (q, k, v, g, beta)} == {1}
        assert g.dtype == initial_state.dtype == torch.float32
        assert torch.equal(cu_seqlens, cu_seqlens_cpu) and cu_seqlens is not cu_seqlens_cpu
        self.calls.append({"boundaries": cu_seqlens, "states": initial_state.clone()})
        out, states = torch.empty_like(v), []
        bounds = cu_seqlens.tolist()
        for i, (first, last) in enumerate(itertools.pairwise(bounds)):
            part = (x[0, first:last].float() for x in (q, k, v, g, beta))
            out[0, first:last], state, _ = recurrent_delta_rule(*part, initial_state[i])
            states.append(state)
        return out, torch.stack(states)


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
    """`fused_recurrent_gated_delta_rule`, likewise, over batches of sequences of equal length."""
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
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    rule = StandIn()
    module = ModuleType("fla.ops.gated_delta_rule")
    module.chunk_gated_delta_rule = rule
    module.fused_recurrent_gated_delta_rule = stand_in_step
    for name, part in [("fla", ModuleType("fla")), ("fla.ops", ModuleType("fla.ops"))]:
        monkeypatch.setitem(sys.modules, name, part)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    fla._rules.cache_clear()
    yield rule
    fla._rules.cache_clear()


def inputs(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    num_tokens = sum(LENGTHS)
    return {
        "q": torch.randn(num_tokens, 2, 16).to(dtype),
        "k": torch.randn(num_tokens, 2, 16).to(dtype),
        "v": torch.randn(num_tokens, 4, 8).to(dtype),
        "g": -torch.rand(num_tokens, 4),
        "beta": torch.rand(num_tokens, 4).to(dtype),
    }


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_states_come_from_their_slots_and_go_back_there(
    stand_in: StandIn, state_dtype: torch.dtype
) -> None:
    pool = torch.full((7, 4, 8, 16), NAN, dtype=state_dtype)
    pool[SLOTS[1:]] = torch.randn(2, 4, 8, 16).to(state_dtype)
    own, given = pool.clone(), inputs(torch.float32)
    out = fla.chunk_gated_delta_rule(
        **given, pool=own, plan=fla.FlaChunkPlan.build(SLOTS, STARTS, LENGTHS)
    )
    plan = ReferenceChunkPlan.build(SLOTS, STARTS, LENGTHS)
    expected = reference.chunk_gated_delta_rule(**given, pool=pool, plan=plan)
    torch.testing.assert_close(out, expected, rtol=0, atol=5e-6)
    torch.testing.assert_close(own, pool, rtol=1e-2, atol=5e-6, equal_nan=True)
    states = stand_in.calls[0]["states"]
    assert not states[0].any(), "a sequence that begins has another's state"


def test_boundaries_are_new_tensors_in_every_step(stand_in: StandIn) -> None:
    """FLA knows them by identity, and would take new ones in an old tensor for the old ones."""
    pool = torch.zeros(7, 4, 8, 16)
    for _ in range(2):
        plan = fla.FlaChunkPlan.build(SLOTS, STARTS, LENGTHS)
        fla.chunk_gated_delta_rule(**inputs(torch.float32), pool=pool, plan=plan)
    first, second = (call["boundaries"] for call in stand_in.calls)
    assert first is not second and first.data_ptr() != second.data_ptr()
    assert first.tolist() == [0, 65, 66, 96]


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
    fla._rules.cache_clear()
    with pytest.raises(BackendUnavailable) as caught:
        fla.FlaChunkPlan.build(SLOTS, STARTS, LENGTHS)
    assert "pip install 'flash-linear-attention" in caught.value.hint
    assert "fla" in caught.value.why
