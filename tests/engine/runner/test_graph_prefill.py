"""Steps of prompts over buffers that stay where they are: the answers of steps that are built anew."""

from pathlib import Path
from typing import Any

import pytest

from minivllm_engine import SamplingParams
from minivllm_engine.ops.prompt_buffers import Bucket
from minivllm_engine.ops.reference_backend import REFERENCE
from minivllm_engine.runner import model_runner
from minivllm_engine.runner.graph_prefill import GraphPrefill
from support.graph_reference import graph_reference
from support.poison import poison_free_memory
from support.request_kinds import contents, engine, ids

BUCKETS = ((8, 1), (24, 1), (24, 3), (70, 1), (70, 4))
PARAMS = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=2)
OPTIONS: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 70}


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], Bucket]]:
    """Prompts go through fixed buffers from now on: lengths of the chunks of each step, and its bucket."""
    operations, seen = graph_reference(), []
    monkeypatch.setattr(model_runner, "choose_operations", lambda *_: operations)
    monkeypatch.setattr(model_runner, "prompt_buckets", lambda *_: BUCKETS)
    load = GraphPrefill.load

    def counted(self: GraphPrefill, sequences: Any, bucket: Bucket) -> int:
        seen.append(([sequence.length for sequence in sequences], bucket))
        return load(self, sequences, bucket)

    monkeypatch.setattr(GraphPrefill, "load", counted)
    return seen


def answers(model: Path, batches: list[list[list[int]]], **options: Any) -> list[Any]:
    """Of batches, one after the other, over memory that is NaN wherever nothing is to be read."""
    found = []
    with engine(model, **(OPTIONS | options)) as llm:
        for prompts in batches:
            poison_free_memory(llm)
            found.append([contents(out) for out in llm.generate(prompts, PARAMS)])
            llm.check_integrity()
    return found


def compare(model: Path, batches: list[list[list[int]]], steps: list[Any], **options: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_runner, "choose_operations", lambda *_: REFERENCE)
        expected = answers(model, batches, **options)
    assert not steps
    assert answers(model, batches, **options) == expected
    assert steps


def test_lengths_in_and_around_every_bucket(tiny_model, steps) -> None:
    lengths = [2, 3, 7, 8, 9, 23, 24, 25, 63, 64]
    compare(tiny_model, [[ids(n, n)] for n in lengths], steps)
    assert steps == [([n], next(bucket for bucket in BUCKETS if n <= bucket[0])) for n in lengths]


def test_prompts_longer_than_a_step_and_several_in_one(tiny_model, steps) -> None:
    batches = [[ids(1, 200)], [ids(2, 20), ids(3, 21), ids(4, 22)], [ids(5, 2)] * 4]
    batches += [
        [ids(6, 90), ids(7, 5), ids(8, 64), ids(9, 1)],
        [ids(10, 5), ids(11, 7), ids(12, 8)],
    ]
    compare(tiny_model, batches, steps)
    assert {bucket for _, bucket in steps} >= {(70, 1), (70, 4), (24, 3)}


def test_what_follows_a_cached_prefix(tiny_model, steps) -> None:
    """States are restored from snapshots, and new ones are taken."""
    prefix = ids(1, 64)
    batches = [[prefix + ids(n, 20)] for n in (2, 3, 4)]
    batches += [[prefix + ids(5, 3), ids(6, 40)], [prefix + ids(2, 20) + ids(7, 60)]]
    compare(tiny_model, batches, steps)
    assert ([3, 40], (70, 4)) in steps or ([40, 3], (70, 4)) in steps


@pytest.mark.parametrize("budget", [2, 9])
def test_decodes_beside_chunks_and_pieces_of_one_token(tiny_model, steps, budget: int) -> None:
    batches = [[ids(1, 30), ids(2, 3), ids(3, 17), ids(4, 1)]]
    compare(tiny_model, batches, steps, max_num_batched_tokens=budget)


def test_what_no_bucket_holds_and_scored_prompts_are_built_anew(tiny_model, steps) -> None:
    scored = PARAMS.model_copy(update={"prompt_logprobs": 1})
    with engine(tiny_model, **OPTIONS) as llm:
        out = llm.generate([ids(1, 9)], scored)[0]
        assert len(out.prompt_logprobs) == 9 and not steps
        runner = llm._loop.open_runner()
        runner.graphs.prompts.buckets = runner.graphs.prompts.buckets[:1]
        llm.generate([ids(2, 9)], PARAMS)
        assert not steps
        llm.generate([ids(3, 8)], PARAMS)
        assert steps == [([8], (8, 1))]


def test_a_failed_step_leaves_nothing_for_the_next(tiny_model, steps, monkeypatch) -> None:
    """Its numbers lie in the buffers, and its states in the slot."""
    with engine(tiny_model, **OPTIONS) as llm:
        expected = [contents(out) for out in llm.generate([ids(1, 20), ids(2, 30)], PARAMS)]
        llm.clear_cache()
        run, calls = GraphPrefill.run, []

        def failing(self: GraphPrefill, bucket: Bucket) -> None:
            calls.append(bucket)
            if len(calls) == 1:
                raise RuntimeError("lost")
            run(self, bucket)

        monkeypatch.setattr(GraphPrefill, "run", failing)
        outs = llm.generate([ids(1, 20), ids(2, 30)], PARAMS)
        assert [contents(out) for out in outs] == expected and len(calls) > 1
        llm.check_integrity()
