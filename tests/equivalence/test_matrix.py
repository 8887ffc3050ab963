"""The invariance matrix: a request gets the same tokens whatever happened before it and goes on beside it.

{alone, batched with strangers, in chunks, warm, warm after eviction, after a sibling branch, preempted,
continued} x prompt lengths of every remainder around one and two blocks x block sizes x steps one by one
or overlapped, on the demo model and on the tiny random one. A sample runs with the tests, the whole by
`make matrix`. In chunks every prompt comes alone, again, and in one more of these ways.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from minivllm_engine import LLM, SamplingParams
from minivllm_engine.core.outputs import RequestOutput
from support.oracle import Oracle, OracleAnswer, agrees
from support.poison import poison_free_memory

NEW_TOKENS = 6
BLOCK_SIZES = [16, 32, 64, 128]
CHUNKS = [1, 2, 7, 63, 64, 65]
PARAMS = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)


@dataclass
class Bench:
    """One model with one prompt of every length: the beginnings of `text`."""

    oracle: Oracle
    text: list[int]
    others: list[list[int]]
    requests: int = 0
    left_at_a_tie: int = 0
    reused: dict[str, int] = field(default_factory=dict)

    def check(self, out: RequestOutput, expected: OracleAnswer) -> None:
        assert out.error is None
        self.requests += 1
        self.left_at_a_tie += not agrees(out.outputs[0], expected)


Way = Callable[[LLM, list[int], Bench], RequestOutput]


def ask(llm: LLM, prompt: list[int], params: SamplingParams = PARAMS) -> RequestOutput:
    poison_free_memory(llm)
    (out,) = llm.generate([prompt], params)
    llm.check_integrity()
    return out


def alone(llm: LLM, prompt: list[int], bench: Bench) -> RequestOutput:
    out = ask(llm, prompt)
    assert out.usage.cached_tokens == 0
    return out


def batched(llm: LLM, prompt: list[int], bench: Bench) -> RequestOutput:
    poison_free_memory(llm)
    rng = random.Random(len(prompt))
    others = [rng.choice(bench.others)[: rng.randint(1, 150)] for _ in range(3)]
    place = rng.randrange(4)
    outs = llm.generate([*others[:place], prompt, *others[place:]], PARAMS)
    llm.check_integrity()
    return outs[place]


def warm(llm: LLM, prompt: list[int], bench: Bench) -> RequestOutput:
    ask(llm, prompt)
    out = ask(llm, prompt)
    interval = llm._cache.interval
    assert out.usage.cached_tokens == (len(prompt) - 1) // interval * interval
    return out


def after_eviction(llm: LLM, prompt: list[int], bench: Bench) -> RequestOutput:
    """Some of what the prompt left is gone: a snapshot, or blocks from the end."""
    ask(llm, prompt)
    cache, rng = llm._cache, random.Random(len(prompt))
    with_snapshot = [node for node in cache.walk() if node.snapshot is not None]
    if with_snapshot and rng.random() < 0.5:
        cache._tree.evict_snapshot(rng.choice(with_snapshot))
    elif cache.num_nodes:
        keep = rng.randrange(cache.num_nodes + 1)
        blocks = cache.allocate(cache.blocks.num_available - keep)
        cache.blocks.release(blocks)
    before = len(prompt) // cache.interval * cache.interval
    out = ask(llm, prompt)
    assert out.usage.cached_tokens <= before
    return out


def after_a_sibling(llm: LLM, prompt: list[int], bench: Bench) -> RequestOutput:
    """Others have begun like the prompt and gone on otherwise, one of them twice."""
    rng = random.Random(len(prompt))
    for place in (rng.randrange(len(prompt)), len(prompt) * 3 // 4, len(prompt) * 3 // 4):
        ask(llm, prompt[:place] + bench.others[0][: 90 + place])
    return ask(llm, prompt)


def preempted(llm: LLM, prompt: list[int], bench: Bench) -> RequestOutput:
    """It loses its blocks and its slot in the middle of the answer, and some of the cache as well."""
    poison_free_memory(llm)
    llm.add_request(prompt, PARAMS)
    rng, steps, finished = random.Random(len(prompt)), 0, None
    while finished is None:
        for out in llm.step():
            finished = out if out.finished else None
        steps += 1
        running = llm._scheduler.running
        if running and steps in (1, 3, 5):
            llm._scheduler.roll_back_all()  # what is in flight cannot be preempted
            llm._loop._flight = None
            for request in running[:1]:
                llm._scheduler._admission.stop(request)
            if rng.random() < 0.3:
                llm.clear_cache()
            poison_free_memory(llm)
        llm.check_integrity()
    return finished


def continued(llm: LLM, prompt: list[int], bench: Bench) -> RequestOutput:
    """A first request ended early; its answer so far is the end of a second one's prompt."""
    short = PARAMS.model_copy(update={"max_tokens": 3})
    first = ask(llm, prompt, short)
    rest = PARAMS.model_copy(update={"max_tokens": NEW_TOKENS - 3})
    out = ask(llm, prompt + first.outputs[0].token_ids, rest)
    whole = out.outputs[0]
    whole.token_ids = first.outputs[0].token_ids + whole.token_ids
    whole.logprobs = first.outputs[0].logprobs + whole.logprobs
    return out


WAYS: dict[str, Way] = {
    way.__name__: way
    for way in (alone, batched, warm, after_eviction, after_a_sibling, preempted, continued)
}

IN_ALL_CHUNKS = ["alone", "warm"]
REUSING = ["warm", "after_eviction", "after_a_sibling", "continued"]


def make_bench(model: object, vocabulary: Sequence[int]) -> Bench:
    rng = random.Random(7)
    text = [rng.choice(vocabulary) for _ in range(2 * max(BLOCK_SIZES) + 3)]
    others = [[rng.choice(vocabulary) for _ in range(400)] for _ in range(3)]
    return Bench(Oracle(model, NEW_TOKENS), text, others)


@pytest.fixture(scope="module")
def tiny_bench(tiny_model) -> Bench:
    return make_bench(tiny_model, range(320))


@pytest.fixture(scope="module")
def demo_bench() -> Bench:
    return make_bench("demo", range(300, 2000))


def run_cell(
    model: object,
    bench: Bench,
    block_size: int,
    budget: int,
    lengths: list[int],
    *,
    overlap: bool = False,
    all_ways: bool = True,
) -> None:
    """Some lengths with one engine: one block size, one token budget, with or without a step in flight
    while the one before is looked at. In all ways, or in those of `IN_ALL_CHUNKS` and one more each."""
    rng = random.Random(f"{block_size} {budget}")
    rest = [name for name in WAYS if name not in IN_ALL_CHUNKS]
    engine = {"max_num_seqs": 4, "max_num_batched_tokens": budget, "max_model_len": 768}
    engine["cpu_memory"] = "64MiB"
    with LLM(
        model, engine=engine, cache={"block_size": block_size, "num_blocks": 2048 // 16}
    ) as llm:
        llm._loop.overlap = overlap
        for length in lengths:
            prompt = bench.text[:length]
            expected = bench.oracle(prompt)
            for name in WAYS if all_ways else [*IN_ALL_CHUNKS, rng.choice(rest)]:
                llm.clear_cache()
                out = WAYS[name](llm, prompt, bench)
                try:
                    bench.check(out, expected)
                except AssertionError as error:
                    pytest.fail(f"{name}, block {block_size}, budget {budget}, {length}: {error}")
                reused = bench.reused.get(name, 0)
                bench.reused[name] = reused + out.usage.cached_tokens


def check_ties(bench: Bench, *, reusing: Sequence[str]) -> None:
    print(f"{bench.requests} requests, {bench.left_at_a_tie} left at a tie, reused {bench.reused}")
    assert bench.left_at_a_tie <= max(1, bench.requests / 1000)
    for name in reusing:
        assert bench.reused[name] > 0, f"nothing was reused in {name}"


def lengths_around(block_size: int) -> list[int]:
    """Every remainder around one block and two, and around one and two units of reuse; and the shortest."""
    units = {block_size, max(block_size, 64)}
    return sorted({*range(1, 5), *(n for unit in units for n in range(unit, 2 * unit + 3))})


def a_few(block_size: int, rng: random.Random, count: int) -> list[int]:
    sharp = [63, 64, 65, 2 * block_size - 1, 2 * block_size, 2 * block_size + 1]
    return [*rng.sample(sharp, 3), *rng.sample(lengths_around(block_size), count - 3)]


def test_a_sample_on_the_tiny_model(tiny_model, tiny_bench) -> None:
    rng = random.Random(1)
    for block_size in BLOCK_SIZES:
        overlap = block_size in (32, 128)
        for budget in (2048, rng.choice(CHUNKS)):
            overlap = not overlap
            lengths = a_few(block_size, rng, 6)
            run_cell(tiny_model, tiny_bench, block_size, budget, lengths, overlap=overlap)
    check_ties(tiny_bench, reusing=REUSING)


def test_a_sample_on_the_demo_model(demo_bench) -> None:
    rng = random.Random(2)
    for block_size, budget, overlap in ((16, 2048, True), (64, 65, False)):
        run_cell("demo", demo_bench, block_size, budget, a_few(block_size, rng, 4), overlap=overlap)
    check_ties(demo_bench, reusing=["warm"])


@pytest.mark.matrix
@pytest.mark.parametrize("quarter", range(4))
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("model", ["tiny", "demo"])
class TestTheWhole:
    """Its lengths in quarters, so that many processes share them evenly."""

    @pytest.fixture
    def run(
        self,
        request: pytest.FixtureRequest,
        model: str,
        block_size: int,
        overlap: bool,
        quarter: int,
    ) -> Callable[..., None]:
        bench = request.getfixturevalue(f"{model}_bench")
        checkpoint = request.getfixturevalue("tiny_model") if model == "tiny" else "demo"
        lengths = lengths_around(block_size)[quarter::4]

        def run_and_check(budget: int, *, all_ways: bool, reusing: Sequence[str]) -> None:
            run_cell(
                checkpoint, bench, block_size, budget, lengths, overlap=overlap, all_ways=all_ways
            )
            check_ties(bench, reusing=reusing)

        return run_and_check

    def test_in_all_ways(self, run: Callable[..., None]) -> None:
        run(2048, all_ways=True, reusing=REUSING)

    @pytest.mark.parametrize("budget", CHUNKS)
    def test_in_chunks(self, run: Callable[..., None], budget: int) -> None:
        run(budget, all_ways=False, reusing=["warm"])
