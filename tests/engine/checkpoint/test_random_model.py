"""Models of a known shape with random weights, and the least that a decode step of them must move."""

import math
from pathlib import Path

import pytest
import torch

from minivllm_engine.checkpoint.names import expected_tensors
from minivllm_engine.checkpoint.random_weights import RandomWeights
from minivllm_engine.core.config import EngineConfig
from minivllm_engine.core.errors import CapacityError, ConfigError, RequestError
from minivllm_engine.core.sampling_params import SamplingParams
from minivllm_engine.engine.prepare import NoTokenizer, PreparedModel, prepare_parts, prepare_random
from minivllm_engine.llm import LLM
from minivllm_engine.memory.devices import host_memory
from minivllm_engine.memory.roofline import decode_step_bytes, decode_weight_bytes
from minivllm_engine.model_config.config import ModelConfig
from minivllm_engine.model_config.generation_config import GenerationConfig
from minivllm_engine.model_config.shapes import SHAPES, shape_config
from minivllm_engine.models.miniqwen import MiniQwenForCausalLM
from minivllm_engine.runner.weights import fill_weights
from support.tiny_checkpoint import tiny_config

# Parameters of the text part, as published; tied heads counted once.
PARAMETERS = {
    "0.8b": 752_393_024,
    "2b": 1_881_825_088,
    "4b": 4_205_751_296,
    "9b": 8_953_803_264,
    "27b": 26_895_998_464,
}
# GB of bf16 weights a decode step reads; MiB of fp32 state, and bytes of bf16 conv state and of KV.
SHEET = {
    "0.8b": (1.505, 18, 663_552, 12_288),
    "2b": (3.76, 18, 663_552, 12_288),
    "4b": (8.41, 48, 1_179_648, 32_768),
    "9b": (15.87, 48, 1_179_648, 32_768),
    "27b": (51.2, 144, 2_949_120, 65_536),
}


def model_of(shape: str) -> ModelConfig:
    return ModelConfig.from_dict(shape_config(shape), source=shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_have_the_parameters_of_the_published_models(shape: str) -> None:
    config = model_of(shape)
    total = sum(
        math.prod(size for _, size in dims)
        for name, dims in expected_tensors(config).items()
        if not (config.tie_word_embeddings and name == "lm_head.weight")
    )
    assert total == PARAMETERS[shape]
    assert (config.dtype, config.state_dtype, config.vocab_size) == ("bf16", "fp32", 248320)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_decode_step_moves_what_the_sheets_say(shape: str) -> None:
    config = model_of(shape)
    tied = config.tie_word_embeddings
    weights, state_mib, conv, kv = SHEET[shape]
    assert decode_weight_bytes(config, "bf16", tied=tied) == pytest.approx(weights * 1e9, rel=2e-3)

    def moved(batch: int, context: float) -> float:
        return decode_step_bytes(config, "bf16", "fp32", batch=batch, context=context, tied=tied)

    sequence = moved(2, 0) - moved(1, 0)
    assert sequence == 2 * (state_mib * 2**20 + conv)
    assert moved(3, 101) - moved(3, 100) == 3 * kv


@pytest.mark.parametrize(
    ("batch", "state", "tok_s"),
    [
        (1, "fp32", 2_900),
        (32, "fp32", 48_600),
        (256, "fp32", 87_600),
        (1, "bf16", 2_930),
        (32, "bf16", 61_100),
        (256, "bf16", 138_700),
    ],
)
def test_the_floor_of_the_smallest_shape_on_a_known_card(
    batch: int, state: str, tok_s: float
) -> None:
    """At 4.49 TB/s and 512 tokens of context."""
    moved = decode_step_bytes(model_of("0.8b"), "bf16", state, batch=batch, context=512, tied=True)
    assert batch / (moved / 4.49e12) == pytest.approx(tok_s, rel=6e-3)


def prepared(seed: int = 0, *, tied: bool = False) -> PreparedModel:
    config = tiny_config(vocab_size=384, tie_word_embeddings=tied)
    return prepare_parts(
        path=Path("random-tiny"),
        model_config=ModelConfig.from_dict(config, source="tiny"),
        weights=RandomWeights(seed),
        tokenizer=NoTokenizer(),
        generation_config=GenerationConfig(),
        config=EngineConfig.create(engine={"max_num_seqs": 4}),
        device=host_memory(),
    )


def tokens(seed: int, *, tied: bool = False) -> list[list[int]]:
    greedy = SamplingParams(temperature=0, max_tokens=12)
    with LLM(prepared(seed, tied=tied)) as llm:
        assert (llm.device, llm.graph_sizes) == ("cpu", ())
        assert llm.load_report.weights_s > 0 and llm.load_report.capture_s == 0
        llm.use_graphs(False)
        with pytest.raises(ConfigError, match="there are no CUDA graphs"):
            llm.use_graphs(True)
        outs = llm.generate([[1, 2, 3], [300, 5], list(range(90))], greedy)
        llm.check_integrity()
    assert all(out.error is None and out.text == "" for out in outs)
    return [out.outputs[0].token_ids for out in outs]


@pytest.mark.parametrize("tied", [False, True])
def test_a_seed_gives_the_same_model_and_answers_that_differ(tied: bool) -> None:
    first = tokens(0, tied=tied)
    assert first == tokens(0, tied=tied)
    assert first != tokens(1, tied=tied)
    assert len({id_ for answer in first for id_ in answer}) > 12  # no model that repeats one token


@pytest.mark.parametrize("tied", [False, True])
def test_logits_have_the_spread_of_a_model(tied: bool) -> None:
    with LLM(prepared(tied=tied)) as llm:
        one = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=100)
        (out,) = llm.generate([list(range(200))], one)
    assert out.prompt_logprobs is not None
    best = [position.top[0].logprob for position in out.prompt_logprobs if position is not None]
    last = [position.top[99].logprob for position in out.prompt_logprobs if position is not None]
    assert all(math.isfinite(value) for value in (*best, *last))
    gap = sum(best) / len(best) - sum(last) / len(last)
    assert 1 < gap < 6  # of the best to the hundredth of 384: 2.1 for a normal spread of 1


def test_every_weight_is_drawn_and_none_is_neutral() -> None:
    source = prepared()
    model = MiniQwenForCausalLM(
        source.model_config, dtype=torch.float32, device=torch.device("cpu")
    )
    for view in model.checkpoint_views().values():
        view.fill_(torch.nan)
    seen: list[tuple[str, int, int]] = []
    fill_weights(model, source.index, progress=lambda *args: seen.append(args))
    views = model.checkpoint_views()
    assert all(view.isfinite().all() and view.std() > 0.01 for view in views.values())
    decay = torch.cat([view for name, view in views.items() if name.endswith("A_log")])
    assert decay.min() >= -2 and decay.max() <= 1
    gated = torch.cat([v for n, v in views.items() if n.endswith("linear_attn.norm.weight")])
    others = torch.cat([v for n, v in views.items() if n.endswith("layernorm.weight")])
    assert abs(gated.mean() - 1) < 0.2 and abs(others.mean()) < 0.2
    assert seen[-1][1] == seen[-1][2] and len(seen) == len(views)


def test_text_is_refused_where_there_is_no_tokenizer() -> None:
    with LLM(prepared()) as llm, pytest.raises(RequestError, match="random weights and no token"):
        llm.add_request("text")


def test_a_shape_is_planned_before_weights_are_drawn() -> None:
    with pytest.raises(CapacityError):
        prepare_random(
            "27b", EngineConfig.create(engine={"cpu_memory": "1GiB", "max_num_seqs": 64})
        )
    found = prepare_random("0.8b", EngineConfig.create(engine={"max_num_seqs": 1}))
    assert found.model_config == model_of("0.8b")
    assert found.end_ids == frozenset()
