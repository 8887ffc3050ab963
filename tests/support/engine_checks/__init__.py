"""What must hold of an engine with graphs and overlap, on any device: see `device_engine.Rig`.

Each check takes an engine that nobody uses, raises AssertionError where something is wrong, and leaves the
engine unused again. CI runs them on a CPU, `make test-gpu` on the card.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from minivllm_engine import LLM, SamplingParams
from minivllm_engine.core.outputs import RequestOutput
from support.poison import poison_free_memory


def greedy_params(max_tokens: int, **more: object) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=0, **more)


def random_prompts(seed: int, lengths: Sequence[int], vocab: int = 320) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(length)] for length in lengths]


def start_anew(llm: LLM) -> None:
    """Nothing cached, and NaN wherever nothing is to be read."""
    assert not llm.has_unfinished
    llm.clear_cache()
    poison_free_memory(llm)


@contextmanager
def recorded_logits(llm: LLM) -> Iterator[list[torch.Tensor]]:
    """The logits of every step that is launched within."""
    runner, found = llm._loop.open_runner(), []
    run = runner.run

    def recording(*args):
        output = run(*args)
        found.append(output.logits.clone())
        return output

    runner.run = recording
    try:
        yield found
    finally:
        del runner.run


def finish_all(llm: LLM) -> dict[str, RequestOutput]:
    """Step until nothing is left, and prove the ownership of all memory after every step."""
    finished = {}
    while llm.has_unfinished:
        finished |= {out.request_id: out for out in llm.step() if out.finished}
        llm.check_integrity()
    return finished


def assert_nothing_held(llm: LLM) -> None:
    stats = llm.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert (stats.kv_blocks_used, stats.state_slots_used) == (0, 0)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, NaN included."""
    if a.shape != b.shape:
        return False
    return torch.equal(*(x.contiguous().view(torch.uint8) for x in (a, b)))
