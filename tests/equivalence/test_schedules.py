"""Same tokens in any schedule: random arrivals, batches, budgets, block sizes, preemptions and aborts,
with the prefix cache on and room for many snapshots, for a few, or for none, and with steps one by one or
overlapped.

One engine serves many schedules in a row, so that slots and blocks change hands, and all of its
memory is filled with NaN before each. After every step the ownership of all blocks and slots is proved.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from minivllm_engine import LLM, SamplingParams
from support.oracle import Oracle, agrees
from support.poison import poison_free_memory

NEW_TOKENS = 16


@dataclass
class Tally:
    requests: int = 0
    left_at_a_tie: int = 0
    preemptions: int = 0
    cached_tokens: int = 0


def random_engine(rng: random.Random, model: object, longest: int, *, crowded: bool) -> LLM:
    block_size = 16 if crowded else rng.choice([16, 32, 64, 128])
    needed = -(-(longest + NEW_TOKENS) // block_size)
    return LLM(
        model,
        engine={
            "max_num_seqs": 6 if crowded else rng.choice([1, 2, 3, 6]),
            "max_num_batched_tokens": rng.choice([3, 7, 63, 64, 65, 100, 2048]),
            "cpu_memory": "64MiB",
        },
        cache={
            "block_size": block_size,
            "num_blocks": needed + rng.choice([0, 1] if crowded else [0, 1, 4, 40]),
            "snapshot_memory": rng.choice([0, 20_000, 1_000_000, 8_000_000]),
        },
    )


def run_schedule(
    llm: LLM, oracle: Oracle, prompts: Sequence[list[int]], rng: random.Random, tally: Tally
) -> None:
    poison_free_memory(llm)
    waiting = [rng.choice(prompts) for _ in range(rng.randint(2, 6))]
    asked: dict[str, list[int]] = {}
    finished = {}
    while waiting or llm.has_unfinished:
        while waiting and rng.random() < 0.6:
            prompt = waiting.pop()
            params = SamplingParams(
                temperature=0,
                max_tokens=rng.choice([1, 5, NEW_TOKENS, NEW_TOKENS]),
                ignore_eos=True,
                logprobs=0,
            )
            asked[llm.add_request(prompt, params)] = prompt
        if asked and rng.random() < 0.02:
            out = llm.abort(rng.choice(list(asked)))
            if out is not None:
                finished[out.request_id] = out
            llm.check_integrity()
        for out in llm.step():
            if out.finished:
                finished[out.request_id] = out
        llm.check_integrity()
    assert set(finished) == set(asked)
    for request_id, out in finished.items():
        assert out.error is None
        tally.requests += 1
        tally.left_at_a_tie += not agrees(out.outputs[0], oracle(asked[request_id]))
    stats = llm.stats()
    assert (stats.kv_blocks_used, stats.state_slots_used) == (0, 0)


def run_many(model: object, prompts: Sequence[list[int]], *, engines: int, each: int) -> Tally:
    oracle, tally = Oracle(model, NEW_TOKENS), Tally()
    shortest_half = sorted(prompts, key=len)[: len(prompts) // 2]
    for number in range(engines):
        rng = random.Random(number)
        # Short prompts in a pool made for them run out of blocks much more often.
        crowded = number % 2 == 0
        chosen = shortest_half if crowded else prompts
        with random_engine(rng, model, max(map(len, chosen)), crowded=crowded) as llm:
            llm._loop.overlap = number % 4 < 2
            for _ in range(each):
                run_schedule(llm, oracle, chosen, rng, tally)
            tally.preemptions += llm.stats().num_preemptions
            tally.cached_tokens += llm.stats().cached_tokens
    return tally


def test_a_thousand_schedules_of_the_tiny_model(tiny_model) -> None:
    rng = random.Random(0)
    lengths = [1, 1, 2, 3, 4, 5, 9, 15, 16, 17, 20, 31, 32, 33, 47, 48, 62, 63, 64, 65, 66, 90, 129]
    prompts = [[rng.randrange(320) for _ in range(length)] for length in lengths]
    for length in (70, 100, 128, 130):  # that begin like one another
        prompts.append(prompts[-1][: length - 25] + [rng.randrange(320) for _ in range(25)])
    tally = run_many(tiny_model, prompts, engines=40, each=25)
    print(tally)
    assert tally.requests > 3500
    assert tally.preemptions > 100
    assert tally.cached_tokens > 5_000
    assert tally.left_at_a_tie <= tally.requests / 1000


def test_fifty_schedules_of_the_demo_model() -> None:
    with LLM("demo", engine={"max_num_seqs": 1}) as llm:
        tokenizer = llm.tokenizer
    questions = [
        "Define aardvark.",
        "What does 'abacus' mean?",
        "meaning of harbor",
        "zebra",
        "Hi!",
    ]
    chats = [[{"role": "user", "content": text}] for text in questions]
    chats.append(
        [
            {"role": "user", "content": " ".join(f"k{i} = {i * 37 % 100}" for i in range(16))},
            {"role": "assistant", "content": "OK."},
            {"role": "user", "content": "What is k7?"},
        ]
    )
    prompts = [tokenizer.encode_chat(chat) for chat in chats]
    tally = run_many("demo", prompts, engines=10, each=5)
    print(tally)
    assert tally.requests > 150
    assert tally.left_at_a_tie <= 1
