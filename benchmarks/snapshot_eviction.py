"""Which snapshots are given up where not all have room: the cache alone, without a model.

    python benchmarks/snapshot_eviction.py [--load NAME] [--chats 24] [--requests 1000]

A load is a sequence of prompts and answers. It runs over a cache with so many snapshots a chat, and beside
it over one whose snapshots all have room. The figure is the share of what the latter saves that the former
saves as well, in tokens: 100 where the budget costs nothing. KV blocks always have room.

Measured with seed 1, before `SnapshotWorth` (recency, and the distance to the snapshot above) and with it.
With seed 2 and with 6 chats (500 requests) no figure got lower by more than 2.

    snapshots a chat                        1            1.5              2              3              4
    round_robin                   0.0 -> 87.8   23.3 -> 97.0   47.1 -> 98.3   72.3 -> 99.6  100.0 -> 99.6
    round_robin_thinking          0.0 -> 79.3    0.0 -> 99.0   45.8 -> 99.6  71.0 -> 100.0 100.0 -> 100.0
    round_robin_long_answers      0.0 -> 84.4    0.0 -> 98.1    0.0 -> 98.2   72.5 -> 98.8  100.0 -> 99.4
    round_robin_and_strangers     0.0 -> 61.7    0.4 -> 96.0   45.9 -> 97.1   66.6 -> 99.1   98.8 -> 99.6
    any_order                    39.0 -> 81.6   52.7 -> 95.5   62.6 -> 98.2   76.9 -> 99.2   85.6 -> 99.7
    any_order_thinking           38.8 -> 77.6   53.8 -> 94.0   63.0 -> 97.6   76.4 -> 99.7   86.4 -> 99.8
    zipf                         46.3 -> 68.0   54.9 -> 78.4   60.5 -> 86.1   69.5 -> 92.6   74.7 -> 96.3
    one_system_prompt            86.9 -> 93.1   89.8 -> 95.4   92.2 -> 96.9   95.4 -> 98.0   96.8 -> 98.5
    branches                     55.3 -> 65.9   66.7 -> 75.4   75.9 -> 82.0   85.0 -> 88.0   90.7 -> 90.5
    branches_thinking            46.4 -> 63.7   62.7 -> 80.0   72.9 -> 86.8   83.1 -> 92.3   89.7 -> 95.0
    branches_and_strangers       48.7 -> 57.1   61.2 -> 72.0   69.1 -> 79.4   79.8 -> 85.4   86.3 -> 88.0
    one_long                      0.0 -> 88.6    0.0 -> 98.2   69.8 -> 98.5   83.9 -> 99.7  100.0 -> 99.8
    documents                    33.3 -> 74.3   45.1 -> 86.7   54.4 -> 94.5   71.8 -> 97.4   81.1 -> 97.8
    repeats                      52.2 -> 71.5   65.3 -> 91.2   75.6 -> 99.9  87.1 -> 100.0  93.8 -> 100.0
"""

import argparse
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from minivllm_engine.cache.block_manager import BlockManager
from minivllm_engine.cache.deltanet_state import DeltaNetStateManager
from minivllm_engine.cache.prefix_cache import PrefixCache
from minivllm_engine.core.request import Request
from minivllm_engine.core.sampling_params import ResolvedSampling

BUDGETS = (1.0, 1.5, 2.0, 3.0, 4.0)  # snapshots a chat
BLOCK_SIZE = 64
OPENING = [
    1,
    2,
    3,
    4,
]  # of an answer; where it was thought first, the last of these is not told again
TURNS = 12  # then another chat takes the place of this one


@dataclass(frozen=True)
class Turn:
    """One request: `answer_at` is where its prompt opens the answer, None for a raw prompt."""

    prompt: list[int]
    answer: list[int]
    answer_at: int | None = None


Load = Callable[[random.Random, int], Iterator[Turn]]


def text(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(10, 100_000) for _ in range(length)]


@dataclass
class Chat:
    """What was said so far, and what each turn began from, so that it can be taken back."""

    rng: random.Random
    told: list[int] = field(default_factory=list)
    thinking: int = 0
    answer: int = 50
    before: list[list[int]] = field(default_factory=list)

    def ask(self, question: list[int] | None = None) -> Turn:
        """The next turn, or the latest one again where the question is that one's."""
        rng = self.rng
        question = text(rng, rng.randint(60, 140)) if question is None else question
        self.before.append(self.told)
        self.question = question
        prompt = self.told + question + OPENING
        thought, said = text(rng, self.thinking), text(rng, rng.randint(20, 2 * self.answer - 20))
        opening = OPENING[:-1] if thought else OPENING
        self.told = self.told + question + opening + said + [5, 6]
        return Turn(prompt, thought + said + [5], len(prompt) - len(OPENING))

    def undo(self) -> None:
        self.told = self.before.pop()

    def fork(self) -> "Chat":
        return Chat(self.rng, self.told, self.thinking, self.answer, list(self.before))


def round_robin(rng: random.Random, chats: int, **kind: int) -> Iterator[Turn]:
    running = [Chat(rng, **kind) for _ in range(chats)]
    for i, chat in enumerate(running):
        chat.before = [[]] * (i % TURNS)  # they do not all end at once
    while True:
        for i, chat in enumerate(running):
            if len(chat.before) >= TURNS:
                running[i] = chat = Chat(rng, **kind)
            yield chat.ask()


def round_robin_thinking(rng: random.Random, chats: int) -> Iterator[Turn]:
    return round_robin(rng, chats, thinking=200)


def round_robin_long_answers(rng: random.Random, chats: int) -> Iterator[Turn]:
    return round_robin(rng, chats, answer=400)


def round_robin_and_strangers(rng: random.Random, chats: int) -> Iterator[Turn]:
    for turn in round_robin(rng, chats):
        yield turn
        if rng.random() < 0.2:
            yield Turn(text(rng, rng.randint(100, 600)), text(rng, 50))


def any_order(rng: random.Random, chats: int, **kind: int) -> Iterator[Turn]:
    running = [Chat(rng, **kind) for _ in range(chats)]
    while True:
        i = rng.randrange(chats)
        if len(running[i].before) >= TURNS:
            running[i] = Chat(rng, **kind)
        yield running[i].ask()


def any_order_thinking(rng: random.Random, chats: int) -> Iterator[Turn]:
    return any_order(rng, chats, thinking=200)


def zipf(rng: random.Random, chats: int) -> Iterator[Turn]:
    count = 4 * chats
    running = [Chat(rng) for _ in range(count)]
    weights = [1 / (rank + 1) for rank in range(count)]
    while True:
        (i,) = rng.choices(range(count), weights)
        if len(running[i].before) >= TURNS:
            running[i] = Chat(rng)
        yield running[i].ask()


def one_system_prompt(rng: random.Random, chats: int) -> Iterator[Turn]:
    systems = [text(rng, 1000), text(rng, 300)]
    running: list[Chat] = []
    while True:
        if len(running) < chats:
            running.append(Chat(rng, rng.choice(systems)))
        chat = rng.choice(running)
        yield chat.ask()
        if rng.random() < 0.5:  # two turns on average
            running.remove(chat)


def branches(rng: random.Random, chats: int, **kind: int) -> Iterator[Turn]:
    running = [Chat(rng, **kind) for _ in range(chats)]
    while True:
        i = rng.randrange(len(running))
        chat, what = running[i], rng.random()
        if len(chat.before) >= TURNS:
            running[i] = chat = Chat(rng, **kind)
        if chat.before and what < 0.25:  # /regen
            chat.undo()
            yield chat.ask(chat.question)
        elif chat.before and what < 0.40:  # /undo, then another question
            chat.undo()
            yield chat.ask()
        elif chat.before and what < 0.50:  # /fork, in place of another chat
            running[rng.randrange(len(running))] = other = chat.fork()
            yield other.ask()
        else:
            yield chat.ask()


def branches_thinking(rng: random.Random, chats: int) -> Iterator[Turn]:
    return branches(rng, chats, thinking=200)


def branches_and_strangers(rng: random.Random, chats: int) -> Iterator[Turn]:
    for turn in branches(rng, chats):
        yield turn
        if rng.random() < 0.5:
            yield Turn(text(rng, rng.randint(100, 600)), text(rng, 50))


def one_long(rng: random.Random, chats: int) -> Iterator[Turn]:
    long = text(rng, 32_000)
    small = round_robin(rng, chats)
    while True:
        for _ in range(2 * chats):
            yield next(small)
        yield Turn(long + text(rng, 100), text(rng, 50))


def documents(rng: random.Random, chats: int) -> Iterator[Turn]:
    texts = [text(rng, rng.randint(500, 6000)) for _ in range(2 * chats)]
    weights = [1 / (rank + 1) for rank in range(len(texts))]
    while True:
        (chosen,) = rng.choices(texts, weights)
        yield Turn(chosen + text(rng, rng.randint(10, 60)), text(rng, 50))


def repeats(rng: random.Random, chats: int) -> Iterator[Turn]:
    prompts = [text(rng, rng.randint(100, 1500)) for _ in range(2 * chats)]
    weights = [1 / (rank + 1) for rank in range(len(prompts))]
    while True:
        (chosen,) = rng.choices(prompts, weights)
        yield Turn(chosen, text(rng, 50))


LOADS: dict[str, Load] = {
    f.__name__: f
    for f in (
        round_robin,
        round_robin_thinking,
        round_robin_long_answers,
        round_robin_and_strangers,
        any_order,
        any_order_thinking,
        zipf,
        one_system_prompt,
        branches,
        branches_thinking,
        branches_and_strangers,
        one_long,
        documents,
        repeats,
    )
}


def make_cache(snapshots: int) -> PrefixCache:
    return PrefixCache(BlockManager(60_000, BLOCK_SIZE), DeltaNetStateManager(1, snapshots))


def run(cache: PrefixCache, turn: Turn) -> int:
    """Serve one request as the scheduler would, alone. Returns the tokens that the cache had."""
    total = len(turn.prompt) + len(turn.answer)
    request = Request(
        "",
        tuple(turn.prompt),
        ResolvedSampling(seed=0),
        0,
        max_total_tokens=total,
        answer_at=turn.answer_at,
    )
    cache.start_from(request, cache.match(request))
    found = request.num_computed_tokens
    prompt = len(turn.prompt)
    for end in [*request.boundaries, prompt]:
        advance(cache, request, end, end in request.boundaries)
    request.output_ids += turn.answer
    first = -(-prompt // cache.grid) * cache.grid
    # The last token of an answer is never computed.
    for end in [*range(first, total, cache.grid), total - 1]:
        advance(cache, request, end, end % cache.grid == 0)
    cache.blocks.release(request.block_table)
    return found


def advance(cache: PrefixCache, request: Request, end: int, snapshot: bool) -> None:
    missing = cache.blocks.blocks_for(end) - len(request.block_table)
    request.block_table += cache.allocate(missing)
    reserved = cache.reserve_snapshot(request, end) if snapshot else None
    request.num_computed_tokens = end
    cache.commit(request, end, reserved)


def saved(load: Load, snapshots: int, chats: int, requests: int, seed: int) -> int:
    """Tokens found in the cache by all requests but those of a quarter at the beginning."""
    cache = make_cache(snapshots)
    turns = load(random.Random(seed), chats)
    found = [run(cache, next(turns)) for _ in range(requests)]
    return sum(found[requests // 4 :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--load", choices=LOADS, action="append")
    parser.add_argument("--chats", type=int, default=24)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    chats, requests = arguments.chats, arguments.requests
    print(f"{'snapshots a chat':26}" + "".join(f"{budget:>7}" for budget in BUDGETS))
    for name in arguments.load or LOADS:
        best = saved(LOADS[name], 100_000, chats, requests, arguments.seed)
        shares = (
            saved(LOADS[name], round(b * chats), chats, requests, arguments.seed) / best
            for b in BUDGETS
        )
        print(f"{name:26}" + "".join(f"{100 * share:7.1f}" for share in shares), flush=True)


if __name__ == "__main__":
    main()
