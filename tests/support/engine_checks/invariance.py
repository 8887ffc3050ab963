"""A request gets the same tokens whatever happened before it and goes on beside it: a sample of the matrix
of tests/equivalence, with graphs, token budgets and steps launched ahead as further axes, on one engine.
"""

import random
from collections.abc import Callable, Sequence
from contextlib import contextmanager

from minivllm_engine import LLM
from minivllm_engine.core.outputs import RequestOutput
from support.engine_checks import greedy_params, random_prompts, start_anew
from support.oracle import Oracle, agrees
from support.poison import poison_free_memory

NEW_TOKENS = 6
PARAMS = greedy_params(NEW_TOKENS)
BUDGETS = (7, 64, 65, 2048)

Way = Callable[[LLM, list[int]], RequestOutput]


def ask(llm: LLM, prompt: list[int]) -> RequestOutput:
    poison_free_memory(llm)
    (out,) = llm.generate([prompt], PARAMS)
    llm.check_integrity()
    return out


def alone(llm: LLM, prompt: list[int]) -> RequestOutput:
    out = ask(llm, prompt)
    assert out.usage.cached_tokens == 0
    return out


def batched(llm: LLM, prompt: list[int]) -> RequestOutput:
    rng = random.Random(len(prompt))
    others = random_prompts(len(prompt), [rng.randint(1, 150) for _ in range(4)])
    place = rng.randrange(5)
    outs = llm.generate([*others[:place], prompt, *others[place:]], PARAMS)
    llm.check_integrity()
    return outs[place]


def warm(llm: LLM, prompt: list[int]) -> RequestOutput:
    ask(llm, prompt)
    out = ask(llm, prompt)
    interval = llm._cache.interval
    assert out.usage.cached_tokens == (len(prompt) - 1) // interval * interval
    return out


def after_eviction(llm: LLM, prompt: list[int]) -> RequestOutput:
    """Some of what the prompt left is gone: a snapshot, or blocks from the end."""
    ask(llm, prompt)
    cache, rng = llm._cache, random.Random(len(prompt))
    with_snapshot = [node for node in cache.walk() if node.snapshot is not None]
    if with_snapshot and rng.random() < 0.5:
        cache._tree.evict_snapshot(rng.choice(with_snapshot))
    elif cache.num_nodes:
        keep = rng.randrange(cache.num_nodes)
        cache.blocks.release(cache.allocate(cache.blocks.num_available - keep))
    return ask(llm, prompt)


def preempted(llm: LLM, prompt: list[int]) -> RequestOutput:
    """It loses its blocks and its slot several times, with steps of it in flight."""
    rng, steps, finished = random.Random(len(prompt)), 0, None
    llm.add_request(prompt, PARAMS)
    while finished is None:
        for out in llm.step():
            finished = out if out.finished else None
        steps += 1
        if steps in (1, 3, 5) and llm.has_unfinished:
            stop_everything(llm)
            if rng.random() < 0.3:
                llm.clear_cache()
            poison_free_memory(llm)
        llm.check_integrity()
    return finished


def stop_everything(llm: LLM) -> None:
    """Preempt all running requests. What is in flight for them is thrown away."""
    llm._loop._flight = None
    llm._scheduler.roll_back_all()
    for request in llm._scheduler.running[:]:
        llm._scheduler._admission.stop(request)


WAYS: tuple[Way, ...] = (alone, batched, warm, after_eviction, preempted)


def check_invariance(
    llm: LLM, oracle: Oracle, lengths: Sequence[int], *, budgets_each: int = 2
) -> None:
    """Every way at every length, with and without graphs, each by some of the budgets in turn."""
    requests = ties = reused = 0
    cell = 0
    for length in lengths:
        (prompt,) = random_prompts(1000 + length, [length])
        expected = oracle(prompt)
        for way in WAYS:
            for graphs in (True, False):
                llm.use_graphs(graphs)
                for _ in range(budgets_each):
                    budget = BUDGETS[cell % len(BUDGETS)]
                    cell += 1
                    start_anew(llm)
                    with token_budget(llm, budget):
                        out = way(llm, prompt)
                    where = f"{way.__name__}, length {length}, budget {budget}, graphs {graphs}"
                    assert out.error is None, where
                    requests += 1
                    reused += out.usage.cached_tokens
                    try:
                        ties += not agrees(out.outputs[0], expected)
                    except AssertionError as error:
                        raise AssertionError(f"{where}: {error}") from error
            cell += 1  # so that budgets and graphs do not go in step
    llm.use_graphs(True)
    print(f"{requests} requests, {ties} left at a tie, {reused} tokens from the cache")
    assert ties <= max(1, requests / 1000)
    assert reused > 0


@contextmanager
def token_budget(llm: LLM, budget: int):
    """Within, a step has at most so many tokens."""
    before = llm._scheduler.max_num_batched_tokens
    assert budget <= llm._plan.max_num_batched_tokens
    llm._scheduler.max_num_batched_tokens = budget
    try:
        yield
    finally:
        llm._scheduler.max_num_batched_tokens = before
