"""Requests of every kind, and all that a user is told of their answers: for ways to run an engine that must
not change any of it.
"""

import random
from pathlib import Path
from typing import Any

from minivllm_engine import LLM, SamplingParams
from minivllm_engine.core.outputs import RequestOutput

VOCAB = 320  # of the tiny model
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def ids(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def engine(model: Path, *, overlap: bool = True, num_blocks: int = 400, **options: Any) -> LLM:
    llm = LLM(
        model,
        engine={"cpu_memory": "64MiB", "max_num_seqs": 4, **options},
        cache={"block_size": 16, "num_blocks": num_blocks},
    )
    llm._loop.runner.pool.fill_(float("nan"))
    llm._loop.overlap = overlap
    return llm


def contents(out: RequestOutput) -> list[tuple[Any, ...]]:
    """All that a user is told of the outputs, but for times and the last bits of logprobs."""

    def rounded(logprobs: Any) -> Any:
        return logprobs and [
            None
            if one is None
            else [(t.token_id, round(t.logprob, 3), t.rank) for t in (one.sampled, *one.top)]
            for one in logprobs
        ]

    return [
        (
            output.token_ids,
            output.text,
            output.reasoning,
            output.finish_reason,
            output.stop_reason,
            rounded(output.logprobs),
            rounded(out.prompt_logprobs),
        )
        for output in out.outputs
    ]


def all_kinds(model: Path) -> tuple[list[Any], list[SamplingParams]]:
    """A request of every kind, and what of it ends sooner than its max_tokens."""
    with engine(model, overlap=False) as llm:
        free = llm.generate(ids(1, 40), GREEDY.model_copy(update={"max_tokens": 24}))[0]
    tokens, text = free.outputs[0].token_ids, free.outputs[0].text
    place = next(i for i in range(5, 24) if tokens.index(tokens[i]) == i)
    new = tokens[place]  # as a token to stop at, it may come no sooner
    hot = {"temperature": 0.9, "seed": 3, "ignore_eos": True, "max_tokens": 14}
    chat = {"messages": [{"role": "user", "content": "Hello there"}]}
    kinds: list[tuple[Any, dict[str, Any]]] = [
        (ids(1, 40), {"max_tokens": 24}),
        (ids(1, 40), {"max_tokens": 24, "stop": (text[9:11],)}),
        (ids(1, 40), {"max_tokens": 24, "stop": (text[9:11],), "min_tokens": 16}),
        (ids(1, 40), {"max_tokens": 24, "stop_token_ids": (tokens[7],)}),
        (ids(1, 40), {"max_tokens": 24, "stop_token_ids": (tokens[7],), "min_tokens": 12}),
        (ids(1, 40), {"max_tokens": 24, "stop_token_ids": (new,), "min_tokens": place}),
        (ids(1, 40), {"max_tokens": 24, "stop_token_ids": (new,), "min_tokens": place + 1}),
        (ids(2, 70), {"max_tokens": 1}),
        (ids(2, 70), {"max_tokens": 1, "n": 3, **hot} | {"max_tokens": 1}),
        (ids(3, 1), {"max_tokens": 2}),
        (ids(4, 90), {"logprobs": 3}),
        (ids(5, 90), {"prompt_logprobs": 2, "logprobs": 0}),
        (ids(6, 33), hot),
        (ids(6, 33), hot | {"n": 3, "logprobs": 1}),
        (ids(7, 33), hot | {"repetition_penalty": 1.3}),
        (ids(7, 33), {"presence_penalty": 0.7, "frequency_penalty": 0.4}),
        (ids(8, 20), hot | {"logit_bias": {5: 4.0}, "top_k": 20, "top_p": 0.9}),
        (chat, {"ignore_eos": False}),
        (chat, hot),
        ([*ids(1, 40), *tokens], {"prefix_cache": False}),
    ]
    shared = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    return [prompt for prompt, _ in kinds], [
        SamplingParams(**(shared | values)) for _, values in kinds
    ]


def count_ahead(llm: LLM) -> list[object]:
    """Steps that were launched while another was in flight, as they come."""
    schedule_ahead, ahead = llm._scheduler.schedule_ahead, []

    def counted() -> object:
        batch = schedule_ahead()
        if batch is not None:
            ahead.append(batch)
        return batch

    llm._scheduler.schedule_ahead = counted
    return ahead
