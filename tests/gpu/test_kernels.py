"""Every kernel against its reference, on the card: the checks that CI runs in the interpreter, larger.

Eager unless a test says graph; there is no prefix cache at this level. Batch sizes stand in the tests.
"""

import warnings

import pytest
import torch

from minivllm_engine.checkpoint.random_weights import RandomWeights
from minivllm_engine.core.request import Request
from minivllm_engine.core.sampling_params import SamplingParams
from minivllm_engine.model_config.config import ModelConfig
from minivllm_engine.model_config.shapes import shape_config
from minivllm_engine.models.miniqwen import MiniQwenForCausalLM
from minivllm_engine.ops import device as device_rules
from minivllm_engine.ops.attention.reference import KVShape
from minivllm_engine.ops.device import has_dependent_launch
from minivllm_engine.ops.gated_delta import fla, reference
from minivllm_engine.ops.gated_delta.plan import ReferenceChunkPlan
from minivllm_engine.ops.kernel_backend import kernel_operations
from minivllm_engine.ops.sampling import reference as sampling_reference
from minivllm_engine.ops.sampling.triton import greedy
from minivllm_engine.ops.small_batch import triton
from minivllm_engine.ops.small_batch.tiles import MAX_ROWS
from minivllm_engine.runner.graph_decode import GraphDecode
from minivllm_engine.runner.weights import fill_weights
from minivllm_engine.scheduling.scheduled_batch import ScheduledSequence
from minivllm_engine.tensors.cache_pool import CachePool
from minivllm_engine.tensors.model_input import AwaitedTokens
from support.kernel_checks import (
    attention,
    causal_conv,
    embedding,
    fused,
    gated_delta,
    model,
    race,
    sampling,
    small_batch,
)
from support.kernel_checks.gated_delta import Heads

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CUDA = torch.device("cuda")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
all_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# The layers of 0.8B, 4B and 27B, and shapes that are no powers of two.
HEADS = {
    "ratio_1": Heads(16, 16, 128, 128),
    "ratio_2": Heads(16, 32, 128, 128),
    "ratio_3": Heads(16, 48, 128, 128),
    "wide_values": Heads(2, 6, 96, 200),
    "wide_keys": Heads(2, 4, 256, 72),
}


@all_dtypes
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("num_seqs", [2, 9])
def test_d1_delta_rule_steps(num_seqs: int, heads: Heads, dtype: torch.dtype) -> None:
    gated_delta.check_steps(CUDA, dtype, heads, num_seqs=num_seqs, num_steps=3)


@all_dtypes
def test_delta_rule_steps_with_states_in_bf16(dtype: torch.dtype) -> None:
    heads = HEADS["ratio_2"]
    gated_delta.check_steps(CUDA, dtype, heads, state_dtype=torch.bfloat16, num_seqs=33)


@all_dtypes
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_delta_rule_over_short_chunks(heads: Heads, dtype: torch.dtype) -> None:
    spans = [(0, 1), (7, 1), (0, 64), (64, 63), (128, 2), (0, 17), (5, 3)]
    gated_delta.check_recurrent(CUDA, dtype, heads, spans)
    gated_delta.check_recurrent(CUDA, dtype, heads, spans[:4], state_dtype=torch.bfloat16)


@all_dtypes
def test_a_short_chunk_has_the_same_bits_wherever_it_is_cut(dtype: torch.dtype) -> None:
    gated_delta.check_recurrent_is_steps(CUDA, dtype, HEADS["ratio_3"])


@all_dtypes
def test_a_sequence_has_the_same_bits_wherever_it_stands(dtype: torch.dtype) -> None:
    gated_delta.check_order_of_lanes(CUDA, dtype, HEADS["ratio_3"])


@all_dtypes
def test_gates(dtype: torch.dtype) -> None:
    for num_tokens, num_heads in [(1, 16), (65, 48), (2000, 32)]:
        gated_delta.check_gates(CUDA, dtype, num_tokens, num_heads)


@all_dtypes
@pytest.mark.parametrize("conv_width", [2, 4])
def test_convolution_steps(conv_width: int, dtype: torch.dtype) -> None:
    for num_channels, num_seqs in [(6144, 64), (7, 3)]:
        causal_conv.check_steps(CUDA, dtype, num_channels, conv_width, num_seqs=num_seqs)


@all_dtypes
@pytest.mark.parametrize("conv_width", [2, 4])
def test_convolution_of_prompts_and_chunks(conv_width: int, dtype: torch.dtype) -> None:
    lengths = [1, 2, 3, 15, 16, 17, 63, 64, 65, 500]
    spans = [(start, length) for length in lengths for start in (0, 1, 64)]
    causal_conv.check_prefill(CUDA, dtype, 1100, conv_width, spans)


SHAPES = {
    "8_2_of_256": KVShape(64, 8, 2, 256),
    "24_4_of_256": KVShape(16, 24, 4, 256),
    "6_2_of_128": KVShape(48, 6, 2, 128),
    "4_4_of_64": KVShape(32, 4, 4, 64),
}
MIXED = [
    (0, 1),
    (62, 1),
    (63, 1),
    (64, 1),
    (500, 1),
    (0, 65),
    (7, 3),
    (64, 64),
    (0, 500),
    (999, 63),
]


@all_dtypes
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_attention_of_a_mixed_batch(shape: KVShape, dtype: torch.dtype) -> None:
    attention.check(CUDA, dtype, shape, MIXED)


@all_dtypes
@pytest.mark.parametrize("splits", [1, 8, 128])
def test_attention_with_split_keys(splits: int, dtype: torch.dtype) -> None:
    spans = [(0, 1), (127, 1), (128, 1), (2000, 1), (5000, 1)]
    attention.check(CUDA, dtype, SHAPES["8_2_of_256"], spans, splits)


@all_dtypes
def test_d6_padding_lanes_of_attention(dtype: torch.dtype) -> None:
    attention.check_padding(CUDA, dtype, SHAPES["8_2_of_256"])


@all_dtypes
@pytest.mark.parametrize("num_rows", [1, 65])
def test_norms_and_activations(num_rows: int, dtype: torch.dtype) -> None:
    for size in (72, 1024, 5120):
        fused.check_norms(CUDA, dtype, num_rows, size)
    for num_heads, size in [(16, 128), (5, 24), (48, 256)]:
        fused.check_gated_norm(CUDA, dtype, num_rows, num_heads, size)
    fused.check_gated_norm(CUDA, dtype, 700, 16, 128)
    for size in (100, 3584, 17408):
        fused.check_activations(CUDA, dtype, num_rows, size)


@all_dtypes
@pytest.mark.parametrize("heads", [(8, 2), (3, 1)], ids=str)
def test_rotary_and_cache_writes(heads: tuple[int, int], dtype: torch.dtype) -> None:
    for num_tokens, head_dim, rotary_dim in [(1, 256, 64), (65, 256, 64), (500, 72, 24)]:
        fused.check_rotary(
            CUDA,
            dtype,
            num_tokens,
            num_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=head_dim,
            rotary_dim=rotary_dim,
        )


@all_dtypes
def test_cosines_and_sines_of_positions(dtype: torch.dtype) -> None:
    fused.check_angles(CUDA, dtype, 64)
    fused.check_angles(CUDA, dtype, 24, factor=1.3)


@all_dtypes
def test_tokens_of_a_step_and_tokens_sampled_before(dtype: torch.dtype) -> None:
    for num_rows, hidden in [(1, 1024), (256, 5120), (7, 72)]:
        embedding.check_embed(CUDA, dtype, num_rows, hidden)


@all_dtypes
@pytest.mark.parametrize("num_rows", range(1, MAX_ROWS + 1))
def test_small_batch_products(num_rows: int, dtype: torch.dtype) -> None:
    """The sizes of 0.8B and of 27B, and sizes that are no multiples of a tile."""
    for num_inputs, num_outputs in [(1024, 8224), (5120, 2000), (96, 200)]:
        small_batch.check_norm_linear(CUDA, dtype, num_rows, num_inputs, num_outputs, bias=True)
    for num_inputs, num_outputs in [(3584, 1024), (17408, 5120), (72, 200)]:
        small_batch.check_linear_add(CUDA, dtype, num_rows, num_inputs, num_outputs)
    for num_heads, size, num_outputs in [
        (16, 128, 1024),
        (8, 256, 1024),
        (48, 128, 600),
        (5, 24, 72),
    ]:
        small_batch.check_gated_products(CUDA, dtype, num_rows, num_heads, size, num_outputs)


@all_dtypes
def test_small_batch_product_with_a_vocabulary(dtype: torch.dtype) -> None:
    small_batch.check_norm_linear(CUDA, dtype, 1, 1024, 248320 // 2)


def test_products_that_start_early_wait_for_each_other() -> None:
    """Graph, 1 and 4 rows: 200 products, each of what the one before wrote, early and one after the other."""
    torch.manual_seed(0)
    weights = [small_batch.random_weight(1024, 1024, torch.bfloat16).to(CUDA) for _ in range(50)]
    scale, eps = torch.ones(1024, device=CUDA), torch.full((1,), 1e-6, device=CUDA)
    for num_rows in (1, 4):
        start = torch.randn(num_rows, 1024).to(CUDA, torch.bfloat16)

        def chain(residual: torch.Tensor, early: bool) -> None:
            for number in range(100):
                up, down = weights[number % 50], weights[(number + 1) % 50]
                wide = triton.norm_linear(residual, scale, eps, up, early=early)
                triton.linear_add_(wide, down, residual, early=early)

        ordered, residual = start.clone(), start.clone()
        chain(ordered, False)
        chain(residual, has_dependent_launch(CUDA))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chain(residual, has_dependent_launch(CUDA))
        for _ in range(5):
            residual.copy_(start)
            graph.replay()
            assert torch.equal(residual, ordered)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", [HEADS["ratio_1"], HEADS["ratio_3"]], ids=["ratio_1", "ratio_3"])
def test_fla_chunks(heads: Heads, dtype: torch.dtype) -> None:
    pytest.importorskip("fla", reason="flash-linear-attention is not installed")
    torch.manual_seed(0)
    lengths = (1, 63, 64, 65, 500, 130)
    starts = (0, 64, 0, 5, 0, 128)
    slots = torch.tensor([9, 0, 3, 7, 1, 4])
    shapes = [(heads.H, heads.K), (heads.H, heads.K), (heads.HV, heads.V)]
    num_tokens = sum(lengths)
    q, k, v = (torch.randn(num_tokens, *shape).to(dtype) for shape in shapes)
    g, beta = -(torch.rand(num_tokens, heads.HV) ** 3), torch.rand(num_tokens, heads.HV).to(dtype)
    pool = torch.full((10, heads.HV, heads.V, heads.K), float("nan"))
    for slot, start in zip(slots.tolist(), starts, strict=True):
        if start:
            pool[slot] = torch.randn(pool.shape[1:])
    own = pool.to(CUDA, copy=True)
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FLA's own
        out = fla.chunk_gated_delta_rule(
            *(reference.l2norm(x.float()).to(dtype).to(CUDA) for x in (q, k)),
            v.to(CUDA),
            g=g.to(CUDA),
            beta=beta.to(CUDA),
            pool=own,
            plan=fla.FlaChunkPlan.build(slots.to(CUDA), starts, lengths),
        )
    plan = ReferenceChunkPlan.build(slots, starts, lengths)
    expected = reference.chunk_gated_delta_rule(q, k, v, g=g, beta=beta, pool=pool, plan=plan)
    assert out.dtype == dtype

    def error(actual: torch.Tensor, wanted: torch.Tensor) -> float:
        return float((actual.cpu().double() - wanted.double()).norm() / wanted.double().norm())

    assert error(out, expected) < 1e-2
    assert error(own[slots], pool[slots]) < 1e-2
    others = [slot for slot in range(10) if slot not in slots.tolist()]
    assert own[others].isnan().all()


@all_dtypes
@pytest.mark.parametrize("heads", [HEADS["ratio_1"], HEADS["ratio_3"]], ids=["ratio_1", "ratio_3"])
def test_fla_steps(heads: Heads, dtype: torch.dtype) -> None:
    pytest.importorskip("fla", reason="flash-linear-attention is not installed")
    for state_dtype in (torch.float32, torch.bfloat16):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # FLA's own
            gated_delta.check_steps(
                CUDA,
                dtype,
                heads,
                state_dtype=state_dtype,
                num_seqs=9,
                num_steps=3,
                step_rule=torch.inference_mode()(fla.gated_delta_step),
                rounds_beta=False,
            )


@pytest.mark.parametrize("library", ["triton", "fla"])
@torch.inference_mode()
def test_a_captured_step_takes_new_slots_and_positions_from_its_buffers(library: str) -> None:
    """Graph: convolution and delta rule, batch of 4, replayed for other sequences in other slots."""
    if library == "fla":
        pytest.importorskip("fla", reason="flash-linear-attention is not installed")
    step_rule = fla.gated_delta_step if library == "fla" else gated_delta.gated_delta_step
    heads, dtype = HEADS["ratio_2"], torch.bfloat16
    torch.manual_seed(0)
    width = 2 * heads.H * heads.K + heads.HV * heads.V
    x = torch.zeros(4, width, dtype=dtype, device=CUDA)
    a, b = (torch.zeros(4, heads.HV, dtype=dtype, device=CUDA) for _ in range(2))
    conv_weight = torch.randn(4, width, dtype=dtype, device=CUDA)
    parameters = [p.to(CUDA) for p in gated_delta.gate_parameters(heads)]
    slots, positions = (torch.zeros(4, dtype=torch.int64, device=CUDA) for _ in range(2))

    def step(conv_pool: torch.Tensor, state_pool: torch.Tensor) -> torch.Tensor:
        mixed = causal_conv.causal_conv_step(
            x, conv_pool, conv_weight, slots=slots, positions=positions
        )
        q, k, v = mixed.split([heads.H * heads.K] * 2 + [heads.HV * heads.V], dim=1)
        return step_rule(
            q.unflatten(1, (heads.H, -1)),
            k.unflatten(1, (heads.H, -1)),
            v.unflatten(1, (heads.HV, -1)),
            a=a,
            b=b,
            A_log=parameters[0],
            dt_bias=parameters[1],
            pool=state_pool,
            slots=slots,
            positions=positions,
        )

    def pools() -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator(CUDA).manual_seed(1)
        conv = torch.randn(9, width, 3, device=CUDA, generator=generator).to(dtype)
        shape = (9, heads.HV, heads.V, heads.K)
        return conv, torch.randn(shape, device=CUDA, generator=generator)

    eager, captured = pools(), pools()
    slots.fill_(-1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FLA's own
        step(*captured)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step(*captured)
    for lanes, places in [
        ([3, 8, -1, -1], [4, 0, 0, 0]),
        ([0, 3, 7, 5], [9, 5, 0, 1]),
        ([7, 8, 8, -1], [1, 0, 0, 0]),
    ]:
        for buffer in (x, a, b):
            buffer.copy_(torch.randn(buffer.shape))
        slots.copy_(torch.tensor(lanes))
        positions.copy_(torch.tensor(places))
        expected = step(*eager)
        graph.replay()
        real = [lane for lane, slot in enumerate(lanes) if 0 <= slot < 8]
        assert torch.equal(replayed[real], expected[real])
    for own, other in zip(captured, eager, strict=True):
        assert torch.equal(own[:8], other[:8])


@all_dtypes
@pytest.mark.parametrize(("num_rows", "vocab"), [(1, 248_320), (70, 248_320), (300, 1001)])
def test_the_likeliest_token(num_rows: int, vocab: int, dtype: torch.dtype) -> None:
    sampling.check_greedy(CUDA, dtype, num_rows, vocab)


@all_dtypes
@pytest.mark.parametrize(("num_rows", "vocab"), [(5, 248_320), (40, 5003)])
def test_draws_of_all_kinds(num_rows: int, vocab: int, dtype: torch.dtype) -> None:
    race.check_race(CUDA, dtype, num_rows, vocab)
    race.check_likelihoods(CUDA, dtype, num_rows, vocab)
    race.check_largest(CUDA, dtype, num_rows, vocab, 128)


def test_captured_the_likeliest_token_lies_in_the_same_place_at_every_replay() -> None:
    """Graph: batch of 5, logits and results in static buffers, and no wait for the card."""
    logits = torch.zeros(5, 248_320, device=CUDA)
    out = (
        torch.zeros(5, dtype=torch.int64, device=CUDA),
        torch.zeros(5, dtype=torch.bool, device=CUDA),
    )
    greedy(logits, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        greedy(logits, out=out)
    for seed in range(3):
        torch.manual_seed(seed)
        numbers = torch.randn(5, 248_320)
        numbers[seed, 77] = float("nan")
        logits.copy_(numbers)
        graph.replay()
        for own, expected in zip(out, sampling_reference.greedy(numbers), strict=True):
            assert own.tolist() == expected.tolist()


@pytest.mark.parametrize("length", [12, 65])
def test_the_model_of_kernels_equals_that_of_reference_operations(tiny_model, length: int) -> None:
    assert not torch.backends.cuda.matmul.allow_tf32
    model.check_mixed_steps(tiny_model, CUDA, length)


def test_static_decode_steps_give_the_logits_of_the_reference(tiny_model) -> None:
    """Eager, batch of 2, and of 4 with two lanes of padding."""
    model.check_static_steps(tiny_model, CUDA)


@torch.inference_mode()
@pytest.mark.parametrize("size", [1, 2, 33])
def test_steps_whose_kernels_start_early_have_the_bits_of_those_that_do_not(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Graph: 20 steps of the 0.8B shape with 8 layers, each with the tokens of the one before it."""
    config = ModelConfig.from_dict(shape_config("0.8b") | {"num_hidden_layers": 8}, "config.json")
    operations = kernel_operations(chunks="reference")
    whole = MiniQwenForCausalLM(config, operations, dtype=torch.bfloat16, device=CUDA)
    fill_weights(whole, RandomWeights())
    pool = CachePool(
        config,
        num_slots=size,
        num_blocks=5 * size,
        block_size=64,
        dtype=torch.bfloat16,
        state_dtype=torch.float32,
        device=CUDA,
    )
    static = GraphDecode(whole, pool, max_batch=size, max_model_len=320)
    params = SamplingParams.create().resolved(seed=0)
    requests = [Request(str(i), (i,) * 320, params, i) for i in range(size)]
    tables = [tuple(range(5 * i, 5 * i + 5)) for i in range(size)]

    def steps(early: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        monkeypatch.setattr(device_rules, "has_dependent_launch", lambda device: early)
        static.load_padding(size)
        static.run(size)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            static.run(size)
        generator = torch.Generator(CUDA).manual_seed(0)
        for tensor in pool.tensors():
            tensor.normal_(generator=generator)
        logits = []
        for step in range(20):
            sequences = tuple(
                ScheduledSequence(request, 260 + step, 1, table, i, True, awaits=step > 0)
                for i, (request, table) in enumerate(zip(requests, tables, strict=True))
            )
            rows = {request: i for i, request in enumerate(requests)}
            awaited = AwaitedTokens(static.sampled, rows) if step else None
            static.load(sequences, awaited, size)
            graph.replay()
            logits.append(static.logits.clone())
        return logits, [tensor.clone() for tensor in pool.tensors()]

    early, ordered = (steps(can) for can in (has_dependent_launch(CUDA), False))
    for found, expected in zip([*early[0], *early[1]], [*ordered[0], *ordered[1]], strict=True):
        assert torch.equal(found, expected)
