"""What the engine allocates is what the plan says, within 1 %; a step stays below its activations."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from minivllm_engine import LLM, SamplingParams
from minivllm_engine.memory.layout import MemoryPlan
from minivllm_engine.ops.operations import DeltaNetWeights
from minivllm_engine.ops.packed import PackedWeight
from support.byte_tokenizer import write_byte_tokenizer
from support.peak_memory import PeakMemory
from support.tiny_checkpoint import write_tiny_checkpoint

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {},
    "tied": {"tie_word_embeddings": True},
    "heads": {
        "hidden_size": 96,
        "num_attention_heads": 6,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_conv_kernel_dim": 3,
        "attention_bias": True,
    },
    "wide": {"intermediate_size": 768},
    "vocabulary": {"vocab_size": 12_000},
    "head of its own": {"vocab_size": 12_000, "tie_word_embeddings": False},
    "attention": {"full_attention_interval": 1, "num_hidden_layers": 2},
    "deltanet": {"full_attention_interval": 9, "num_hidden_layers": 2},
}
NUMBERS = [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16")]


def open_llm(path: Path, changes: dict[str, Any], **sections: dict[str, Any]) -> LLM:
    write_tiny_checkpoint(path, **changes)
    write_byte_tokenizer(path)
    return LLM(path, **sections)


def held(objects: Iterable[object]) -> int:
    """Bytes of all different storages among tensors, and tuples of them."""
    storages: dict[int, int] = {}
    kept = list(objects)
    for item in kept:
        for one in item if isinstance(item, tuple) else (item,):
            if isinstance(one, torch.Tensor):
                storage = one.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def model_tensors(model: torch.nn.Module) -> Iterable[object]:
    for module in model.modules():
        yield from module._parameters.values()
        for value in vars(module).values():
            yield value
            if isinstance(value, PackedWeight):
                yield torch.empty(value.nbytes, dtype=torch.uint8)
            if isinstance(value, DeltaNetWeights):
                yield from vars(value).values()


def parts(llm: LLM) -> tuple[MemoryPlan, Any]:
    assert llm._loop.runner is not None
    return llm._plan, llm._loop.runner


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "state_dtype"), NUMBERS)
def test_f5_what_is_allocated_is_what_was_planned(
    tmp_path: Path, shape: str, dtype: str, state_dtype: str
) -> None:
    engine = {"dtype": dtype, "state_dtype": state_dtype, "max_num_seqs": 5}
    cache = {"num_blocks": 9, "block_size": 32}
    with open_llm(tmp_path, SHAPES[shape], engine=engine, cache=cache) as llm:
        llm.generate([1, 2, 3], SamplingParams(max_tokens=2))
        plan, runner = parts(llm)
        weights = held(model_tensors(runner.model))
        # Not planned: an epsilon for each norm, and the rotary frequencies.
        unplanned = 16 * (llm.model_config.num_hidden_layers + 1) + 4 * llm.model_config.rotary_dim
        assert 0 <= weights - plan.weight_bytes <= unplanned < 0.01 * weights
        states = held((*runner.pool.conv, *runner.pool.recurrent))
        assert states == plan.state_bytes
        assert held((*runner.pool.keys, *runner.pool.values)) == plan.kv_bytes
        assert runner.pool.num_bytes == plan.pool_bytes


def test_k16_requests_use_a_slot_each_and_the_blocks_of_their_lengths(tmp_path: Path) -> None:
    lengths = [3, 15, 16, 17, 31, 33, 40, 64]
    with open_llm(tmp_path, {}, engine={"max_num_seqs": 9}, cache={"block_size": 16}) as llm:
        for number, length in enumerate(lengths):
            llm.add_request([number] * length, SamplingParams(max_tokens=8, ignore_eos=True))
        llm.step()
        stats = llm.stats()
        assert stats.state_slots_used == 8
        assert stats.kv_blocks_used == sum(-(-length // 16) for length in lengths)
        plan, _ = parts(llm)
        assert (stats.state_slots_total, stats.kv_blocks_total) == (9, plan.num_blocks)
        rows = plan.rows(from_headers=True)
        assert sum(row.num_bytes for row in rows) == plan.device.total


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "state_dtype"), NUMBERS)
@pytest.mark.parametrize(("num_tokens", "num_seqs"), [(256, 16), (1024, 4)])
def test_a_step_needs_what_was_planned_and_not_much_less(
    tmp_path: Path, shape: str, dtype: str, state_dtype: str, num_tokens: int, num_seqs: int
) -> None:
    engine = {
        "dtype": dtype,
        "state_dtype": state_dtype,
        "max_num_seqs": num_seqs,
        "max_num_batched_tokens": num_tokens,
    }
    with open_llm(tmp_path, SHAPES[shape], engine=engine) as llm:
        llm.generate([1, 2, 3], SamplingParams(max_tokens=2))
        # In one step, and all side by side: nobody waits for another's beginning.
        params = SamplingParams(max_tokens=2, repetition_penalty=1.1, prefix_cache=False)
        peaks = []
        for prompts in ([[5] * num_tokens], [[5] * (num_tokens // num_seqs - 1)] * num_seqs):
            for prompt in prompts:
                llm.add_request(prompt, params)
            with PeakMemory() as memory:
                while llm.has_unfinished:
                    llm.step()
            peaks.append(memory.peak)
        planned = parts(llm)[0].activation_bytes
        assert max(peaks) <= planned <= 2 * max(peaks), planned / max(peaks)
