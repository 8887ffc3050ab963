"""Decode steps over buffers that stay where they are: padding, tables, and tokens that are still awaited."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minivllm_engine import SamplingParams
from minivllm_engine.core.request import Request
from minivllm_engine.runner import model_runner
from minivllm_engine.runner.graph_decode import GraphDecode
from minivllm_engine.scheduling.scheduled_batch import ScheduledSequence
from minivllm_engine.tensors.model_input import AwaitedTokens, ModelInput
from support.graph_reference import graph_reference
from support.request_kinds import GREEDY, all_kinds, contents, count_ahead, engine, ids
from support.scheduler_simulation import make_request

BLOCK, SINK = 16, 99


class Recorder:
    """A model that keeps what it is given, and whose most likely tokens are 500 and those after it."""

    def __init__(self) -> None:
        self.config, self.dtype = SimpleNamespace(vocab_size=8), torch.float32
        self.device = torch.device("cpu")
        self.operations = SimpleNamespace(graph_decode=True, greedy=self.greedy)
        self.seen: dict[str, Any] = {}

    def all_logits(self, batch: ModelInput, pool: object, out: torch.Tensor) -> torch.Tensor:
        names = ("token_ids", "positions", "slots", "kv_slots", "block_tables")
        self.seen = {name: getattr(batch, name).tolist() for name in names}
        assert batch.sampled is not None
        last = batch.sampled.token_ids.tolist()
        sources = batch.sampled.sources.tolist()
        ids = zip(self.seen["token_ids"], sources, strict=True)
        self.seen["token_ids"] = [last[source] if source >= 0 else own for own, source in ids]
        return out

    def greedy(self, logits: torch.Tensor, out: tuple[torch.Tensor, torch.Tensor]) -> None:
        out[0].copy_(torch.arange(500, 500 + logits.shape[0]))


@pytest.fixture
def model() -> Recorder:
    return Recorder()


@pytest.fixture
def static(model: Recorder) -> GraphDecode:
    pool = SimpleNamespace(block_size=BLOCK, sink_block=SINK)
    return GraphDecode(model, pool, max_batch=4, max_model_len=4 * BLOCK)


def sequence(
    request: Request, start: int, table: tuple[int, ...], slot: int, *, awaits: bool = False
) -> ScheduledSequence:
    return ScheduledSequence(request, start, 1, table, slot, samples=True, awaits=awaits)


def step_of(*sequences: ScheduledSequence) -> tuple[ScheduledSequence, ...]:
    return sequences


def requests() -> list[Request]:
    return [make_request(i, tuple(range(100 * i, 100 * i + 40)), 20) for i in range(3)]


def test_lanes_without_a_sequence_are_nobodys(static: GraphDecode, model: Recorder) -> None:
    a, b, c = requests()
    full = step_of(
        sequence(a, 17, (5, 6), 2), sequence(b, 3, (7,), 0), sequence(c, 39, (1, 2, 3), 1)
    )
    for count in (3, 1, 2, 3):  # lanes that had a sequence before, too
        static.load(full[:count], None, 4)
        static.run(4)
        rest = 4 - count
        assert model.seen["token_ids"] == [17, 103, 239][:count] + [0] * rest
        assert model.seen["positions"] == [17, 3, 39][:count] + [0] * rest
        assert model.seen["slots"] == [2, 0, 1][:count] + [-1] * rest
        assert (
            model.seen["kv_slots"]
            == [6 * BLOCK + 1, 7 * BLOCK + 3, 3 * BLOCK + 7][:count] + [-1] * rest
        )
        tables = [[5, 6, SINK, SINK], [7, SINK, SINK, SINK], [1, 2, 3, SINK]]
        assert model.seen["block_tables"] == tables[:count] + [[SINK] * 4] * rest
    static.load_padding(2)
    static.run(2)
    assert model.seen["slots"] == model.seen["kv_slots"] == [-1, -1]
    assert model.seen["block_tables"] == [[SINK] * 4] * 2


def test_a_block_that_was_exchanged_is_the_new_one_from_then_on(
    static: GraphDecode, model: Recorder
) -> None:
    (a, *_) = requests()
    tables = [(4, 5), (4, 5), (8, 5), (8, 5), (8, 5, 9), (2,), (2,), (2,)]
    for step, table in enumerate(tables):
        static.load(step_of(sequence(a, step, table, 0)), None, 1)
        static.run(1)
        assert model.seen["block_tables"] == [[*table, *[SINK] * (4 - len(table))]]
        assert model.seen["kv_slots"] == [table[0] * BLOCK + step]


def test_tokens_are_taken_from_the_step_before_by_request_and_not_by_lane(
    static: GraphDecode, model: Recorder
) -> None:
    a, b, c = requests()
    static.load(step_of(sequence(a, 39, (1, 2, 3), 0), sequence(b, 39, (4, 5, 6), 1)), None, 2)
    static.run(2)  # a gets 500, b gets 501
    awaited = AwaitedTokens(static.sampled[:2], {a: 0, b: 1})
    following = step_of(
        sequence(c, 7, (7,), 2),
        sequence(b, 40, (4, 5, 6), 1, awaits=True),
        sequence(a, 40, (1, 2, 3), 0, awaits=True),
    )
    static.load(following, awaited, 4)
    static.run(4)
    assert model.seen["token_ids"] == [207, 501, 500, 0]
    # And its own tokens for the one after, which awaits another lane's.
    static.load(
        step_of(sequence(a, 41, (1, 2, 3), 0, awaits=True)),
        AwaitedTokens(static.sampled[:3], {c: 0, b: 1, a: 2}),
        1,
    )
    static.run(1)
    assert model.seen["token_ids"] == [502]


def test_tokens_that_were_drawn_elsewhere_are_taken_over(
    static: GraphDecode, model: Recorder
) -> None:
    a, b, c = requests()
    # Of a step with prompts, or one whose tokens are not the most likely.
    awaited = AwaitedTokens(torch.tensor([71, 72, 73]), {c: 0, a: 1, b: 2})
    static.load(
        step_of(
            sequence(a, 40, (1, 2, 3), 0, awaits=True), sequence(b, 40, (4, 5, 6), 1, awaits=True)
        ),
        awaited,
        2,
    )
    static.run(2)
    assert model.seen["token_ids"] == [72, 73]
    # Where nobody awaits any, what is there does no harm.
    static.load(step_of(sequence(c, 8, (7,), 2)), awaited, 1)
    static.run(1)
    assert model.seen["token_ids"] == [208]


def test_what_is_being_copied_is_not_overwritten_by_the_next_step(static: GraphDecode) -> None:
    a, b, _ = requests()
    for request, slot in ((a, 3), (b, 1), (a, 2)):
        before = static._host[0].numbers.array.copy(), static._host[0].tables.array.copy()
        static.load(step_of(sequence(request, 5, (slot, 9), slot)), None, 1)
        assert (static._host[1].numbers.array == before[0]).all()
        assert (static._host[1].tables.array == before[1]).all()
        assert static._host[0].numbers.array[3, 0] == slot


# -- in the engine -------------------------------------------------------------------------------


def decode_statically(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines decode as on a GPU from now on, with the reference operations."""
    operations = graph_reference()
    monkeypatch.setattr(model_runner, "choose_operations", lambda *_: operations)


def one_by_one(model: Path, prompts: list[Any], params: list[SamplingParams]) -> list[Any]:
    """What requests are answered without static buffers."""
    with engine(model, overlap=False, max_num_seqs=6) as llm:
        assert llm._loop.runner.graphs is None
        return [contents(llm.generate([p], s)[0]) for p, s in zip(prompts, params, strict=True)]


@pytest.mark.parametrize("sizes", [{}, {"max_num_batched_tokens": 7}, {"num_blocks": 8}], ids=str)
def test_answers_are_those_of_steps_that_are_built_anew(
    tiny_model, monkeypatch, caplog, sizes
) -> None:
    prompts, params = all_kinds(tiny_model)
    expected = one_by_one(tiny_model, prompts, params)
    decode_statically(monkeypatch)
    with engine(tiny_model, **({"max_num_seqs": 6} | sizes)) as llm:
        ahead = count_ahead(llm)
        assert [contents(out) for out in llm.generate(prompts, params)] == expected
        assert len(ahead) > 20
        assert "failed" not in caplog.text  # which would be made good silently
        llm.check_integrity()


@pytest.mark.parametrize("budget", [1, 2, 3, 4])
def test_a_piece_of_a_prompt_that_is_one_token_long_gives_nobody_a_token(
    tiny_model, monkeypatch, caplog, budget
) -> None:
    # The long one comes first, so that its pieces lie before the tokens of the others.
    prompts, params = [ids(2, 70), ids(1, 3), ids(3, 67)], [GREEDY] * 3
    expected = one_by_one(tiny_model, prompts, params)
    decode_statically(monkeypatch)
    with engine(tiny_model, max_num_seqs=6, max_num_batched_tokens=budget) as llm:
        assert [contents(out) for out in llm.generate(prompts, params)] == expected
    assert "failed" not in caplog.text
