"""Scores of continuations: those of transformers, whatever runs beside them, and the same when repeated."""

import pytest
import torch

from minivllm_engine import LLM, RequestError, SamplingParams
from minivllm_engine.runner import model_runner, scoring
from support.graph_reference import graph_reference
from support.request_kinds import engine
from support.transformers_oracle import TransformersOracle

TOLERANCE = 1e-4
LETTERS = [[65], [66], [67], [68]]


def ids(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 320, (length,), generator=generator).tolist()


def item(context: list[int], *continuations: list[int]) -> dict:
    return {"prompt_token_ids": context, "continuation_token_ids": list(continuations)}


def pairs() -> list[dict]:
    lengths = (1, 2, 63, 64, 65, 128, 129, 130)
    return [
        item(ids(length, length), *(ids(900 + k, k) for k in (1, 2, 65)), *LETTERS)
        for length in lengths
    ]


class Oracle:
    """transformers, which is asked once about each sequence."""

    def __init__(self, path) -> None:
        self._model = TransformersOracle(path)
        self._known: dict[tuple[int, ...], torch.Tensor] = {}

    def logprobs(self, token_ids: list[int]) -> torch.Tensor:
        """[num_tokens, vocab_size] in float64."""
        key = tuple(token_ids)
        if key not in self._known:
            self._known[key] = self._model.logits(token_ids).double().log_softmax(-1)
        return self._known[key]


@pytest.fixture(scope="module")
def oracle(tiny_model) -> Oracle:
    return Oracle(tiny_model)


@pytest.fixture
def llm(tiny_model):
    with LLM(tiny_model, engine={"max_num_seqs": 4}) as llm:
        llm._loop.runner.pool.fill_(float("nan"))
        yield llm
        llm.check_integrity()
        assert llm.stats().state_slots_used == 0


def assert_like_transformers(out, asked: dict, oracle) -> None:
    assert out.error is None
    assert out.outputs == []
    assert out.finish_reason == "stop"
    context = asked["prompt_token_ids"]
    assert [score.index for score in out.scores] == list(range(len(out.scores)))
    for score, wanted in zip(out.scores, asked["continuation_token_ids"], strict=True):
        rows = oracle.logprobs([*context, *wanted[:-1]])[len(context) - 1 :]
        expected = rows.gather(1, torch.tensor(wanted)[:, None])[:, 0].tolist()
        assert list(score.token_ids) == wanted
        assert score.logprobs == pytest.approx(expected, abs=TOLERANCE)
        assert score.logprob == pytest.approx(sum(score.logprobs))
        assert score.is_greedy == (rows.argmax(-1).tolist() == wanted)
    assert out.usage.scored_tokens == sum(map(len, asked["continuation_token_ids"]))
    assert out.usage.prompt_tokens == len(context)


def scores_of(outs) -> list:
    return [out.scores for out in outs]


@pytest.mark.parametrize("budget", [1, 7, 64, 2048])
def test_scores_are_those_of_transformers_and_repeated_warm_the_same(
    tiny_model, oracle, budget
) -> None:
    asked = pairs() if budget > 1 else pairs()[3:5]
    options = {"max_num_seqs": 4, "max_num_batched_tokens": budget}
    with LLM(tiny_model, engine=options) as llm:
        llm._loop.runner.pool.fill_(float("nan"))
        cold = llm.score(asked)
        for out, one in zip(cold, asked, strict=True):
            assert_like_transformers(out, one, oracle)
        before = llm.stats().prompt_tokens_computed
        warm = llm.score(asked)
        computed = llm.stats().prompt_tokens_computed - before
        for out, one in zip(warm, asked, strict=True):
            assert_like_transformers(out, one, oracle)
        # A budget below the grid cuts chunks by what runs beside them, which differs the first time.
        assert scores_of(llm.score(asked)) == scores_of(warm)
        assert budget < 2048 or scores_of(warm) == scores_of(cold)
        cached = [(len(one["prompt_token_ids"]) - 1) // 64 * 64 for one in asked]
        assert [out.usage.cached_tokens for out in warm] == cached
        # A sequence for the letters and the single token, one for each other continuation.
        whole = sum(len(one["prompt_token_ids"]) * 3 + 1 + 64 for one in asked)
        assert computed == whole - 3 * sum(cached)
        llm.check_integrity()


def test_greedy_flags_are_true_where_the_model_would_have_written_it(llm) -> None:
    context = ids(4, 70)
    greedy = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    written = llm.generate([context], greedy)[0].outputs[0].token_ids
    other = [*written[:-1], (written[-1] + 1) % 320]
    scores = llm.score(item(context, written, other, written[:1]))[0].scores
    assert [score.is_greedy for score in scores] == [True, False, True]
    assert scores[0].logprobs[:-1] == scores[1].logprobs[:-1]


def test_four_letters_are_one_sequence_without_a_token_beyond_the_context(llm) -> None:
    llm.score(item(ids(1, 65), *LETTERS))
    assert llm.stats().prompt_tokens_computed == 65
    assert llm.stats().num_steps == 2  # to the snapshot's boundary, and from there


def test_the_last_token_of_a_context_is_no_decode_for_a_graph(
    tiny_model, oracle, monkeypatch
) -> None:
    """64m + 1 tokens: behind the snapshot one is left, as in a step of decodes, and its row is scored."""
    operations = graph_reference()
    monkeypatch.setattr(model_runner, "choose_operations", lambda *_: operations)
    asked = [item(ids(seed, 65), *LETTERS) for seed in range(3)]
    with engine(tiny_model) as llm:
        cold, warm = llm.score(asked), llm.score(asked)
        for out, again, one in zip(cold, warm, asked, strict=True):
            assert_like_transformers(out, one, oracle)
            assert (again.scores, again.usage.cached_tokens) == (out.scores, 64)
        greedy = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        alone = llm.generate([ids(77, 64)], greedy)[0].outputs[0].token_ids
        llm.add_request(ids(77, 64), greedy, request_id="beside")
        done = {}
        for place, one in enumerate(asked):
            llm.step()
            llm.add_score(one, request_id=str(place))
        while llm.has_unfinished:
            done |= {out.request_id: out for out in llm.step() if out.finished}
        assert done["beside"].outputs[0].token_ids == alone
        assert_like_transformers(done["1"], asked[1], oracle)
        llm.check_integrity()


def test_a_header_is_computed_once(llm) -> None:
    header = ids(2, 200)
    asked = [item(header + ids(seed, 30), *LETTERS) for seed in range(10, 16)]
    llm.score(asked)
    assert llm.stats().prompt_tokens_computed <= 230 + 5 * (230 - 192)


def test_shuffled_and_beside_decodes_the_scores_are_the_same(llm, oracle) -> None:
    asked = pairs()
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    alone = llm.generate([ids(77, 90)], greedy)[0].outputs[0].token_ids
    order = [5, 0, 7, 2, 6, 1, 4, 3]
    llm.add_request(ids(77, 90), greedy, request_id="beside")
    for place in order:
        llm.add_score(asked[place], request_id=str(place))
    done = {}
    while llm.has_unfinished:
        done |= {out.request_id: out for out in llm.step() if out.finished}
        llm.check_integrity()
    assert done["beside"].outputs[0].token_ids == alone
    assert done["beside"].scores is None
    for place, one in enumerate(asked):
        assert_like_transformers(done[str(place)], one, oracle)


def test_a_preempted_request_scores_each_row_once(tiny_model, oracle) -> None:
    options = {"max_num_seqs": 6, "max_num_batched_tokens": 32}
    asked = [item(ids(seed, 40), ids(50 + seed, 60)) for seed in range(4)]
    with LLM(tiny_model, engine=options, cache={"block_size": 16, "num_blocks": 16}) as llm:
        llm._loop.runner.pool.fill_(float("nan"))
        greedy = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
        llm.add_request(ids(9, 90), greedy, request_id="greedy")
        for place, one in enumerate(asked):
            llm.add_score(one, request_id=str(place))
        done, preempted = {}, False
        for step in range(500):
            if step == 5:  # the youngest gives way in the middle of its continuation
                admission = llm._scheduler._admission
                youngest = admission.running[-1]
                assert youngest.targets
                preempted = admission.preempt_for(admission.running[0]) is youngest
            done |= {out.request_id: out for out in llm.step() if out.finished}
            llm.check_integrity()
            if not llm.has_unfinished:
                break
        assert preempted
        for place, one in enumerate(asked):
            assert_like_transformers(done[str(place)], one, oracle)
        assert len(done["greedy"].outputs[0].token_ids) == 100


def test_rows_scored_before_a_preemption_stay_scored(tiny_model, oracle) -> None:
    one = item(ids(1, 40), ids(2, 60))
    with LLM(tiny_model, engine={"max_num_batched_tokens": 7}) as llm:
        llm._loop.runner.pool.fill_(float("nan"))
        llm.add_score(one, request_id="a")
        (request,) = llm._scheduler.waiting
        while len(request.row_scores) < 10:
            llm.step()
        kept = list(request.row_scores)
        llm._scheduler._admission.stop(request)
        outs = []
        while llm.has_unfinished:
            outs = llm.step()
        assert_like_transformers(outs[-1], one, oracle)
        assert request.row_scores[: len(kept)] == kept


def test_aborted_it_tells_what_is_whole_and_holds_nothing(tiny_model) -> None:
    with LLM(tiny_model, engine={"max_num_batched_tokens": 64}) as llm:
        llm.add_score(item(ids(1, 40), [1], ids(2, 300)), request_id="a")
        news = next(out for _ in range(9) for out in llm.step() if out.scores)
        assert [score.index for score in news.scores] == [0]
        assert news.finish_reason is None
        out = llm.abort("a")
        assert out.finished
        assert out.finish_reason == "abort"
        assert [score.index for score in out.scores] == [0]
        assert not llm.has_unfinished
        llm.check_integrity()
        assert llm.stats().state_slots_used == 0


def test_it_may_fill_the_context_to_the_last_token(tiny_model, oracle) -> None:
    with LLM(tiny_model, engine={"max_model_len": 64}, cache={"num_blocks": 4}) as llm:
        fits, too_long = item(ids(1, 60), ids(2, 5)), item(ids(1, 60), [1], ids(2, 6))
        llm.add_score(fits, request_id="fits")
        done = [out for _ in range(9) for out in llm.step() if out.finished]
        assert_like_transformers(done[0], fits, oracle)
        good, bad = llm.score([fits, too_long])
        assert_like_transformers(good, fits, oracle)
        assert bad.error.code == "prompt_too_long"
        assert "60 prompt tokens + 6 of continuation 1 - 1 > max_model_len 64" in str(bad.error)


def test_a_text_without_a_prompt_is_rolling(llm, oracle) -> None:
    text = "Gated DeltaNet"
    plain, prefixed, single = llm.score(
        [
            {"prompt": "", "continuations": [text]},
            {"prompt": "", "continuations": [text], "prefix_token_id": 7},
            {"prompt": "", "continuations": ["G", "Ga"]},
        ]
    )
    own = list(plain.scores[0].token_ids)
    assert len(own) == len(text)
    rows = oracle.logprobs(own)
    expected = [rows[i, own[i + 1]].item() for i in range(len(own) - 1)]
    assert plain.scores[0].logprobs[0] is None
    assert list(plain.scores[0].logprobs[1:]) == pytest.approx(expected, abs=TOLERANCE)
    assert plain.scores[0].logprob == pytest.approx(sum(expected), abs=1e-3)
    assert plain.scores[0].num_bytes == len(text)
    assert_like_transformers(prefixed, item([7], own), oracle)
    assert [score.logprobs[0] for score in single.scores] == [None, None]
    assert single.scores[0].logprob == 0
    assert single.scores[1].logprobs[1] == pytest.approx(plain.scores[0].logprobs[1], abs=1e-5)


def test_a_full_vocabulary_exists_for_a_group_of_rows_only(llm, monkeypatch) -> None:
    logits, rows = llm._loop.runner.model.logits, []

    def counted(hidden):
        rows.append(len(hidden))
        return logits(hidden)

    monkeypatch.setattr(llm._loop.runner.model, "logits", counted)
    asked = item(ids(1, 40), ids(2, 400))
    whole = llm.score(asked)[0].scores[0]
    assert max(rows) > 300
    llm.clear_cache()
    rows.clear()
    monkeypatch.setattr(scoring, "_GROUP_ELEMENTS", 32 * 320)
    grouped = llm.score(asked)[0].scores[0]
    assert max(rows) == 32
    assert grouped.logprobs == pytest.approx(whole.logprobs, abs=1e-5)


def test_prompt_logprobs_and_scores_share_a_step(llm, oracle) -> None:
    one = item(ids(1, 30), ids(2, 9))
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    llm.add_request(ids(3, 30), params, request_id="prompt")
    llm.add_score(one, request_id="score")
    done = {}
    while llm.has_unfinished:
        done |= {out.request_id: out for out in llm.step() if out.finished}
    assert_like_transformers(done["score"], one, oracle)
    rows = oracle.logprobs(ids(3, 30))
    expected = [rows[i, token_id].item() for i, token_id in enumerate(ids(3, 30)[1:])]
    found = [entry.sampled.logprob for entry in done["prompt"].prompt_logprobs[1:]]
    assert found == pytest.approx(expected, abs=2e-4)


def test_dead_logits_end_the_request_alone(llm, monkeypatch) -> None:
    logits = llm._loop.runner.model.logits

    def broken(hidden):
        rows = logits(hidden)
        if len(rows) == 9 + 3:
            rows[5] = float("nan")
        return rows

    monkeypatch.setattr(llm._loop.runner.model, "logits", broken)
    bad, good = llm.score([item(ids(1, 30), ids(2, 9)), item(ids(3, 30), ids(4, 3))])
    assert bad.error.code == "non_finite_logits"
    assert "at position 35 " in bad.error.why
    assert good.error is None


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"prompt": "x"}, "needs one of continuations, continuation_token_ids"),
        ({"prompt": "x", "continuations": []}, "continuations: not a list with something in it"),
        ({"prompt": "x", "continuations": ["a", ""]}, r"continuations\[1\]: not a text, or empty"),
        ({"prompt": "x", "continuations": [["a"]]}, r"continuations\[0\]: not a text"),
        ({"prompt": "x", "continuation_token_ids": [[999]]}, r"\[0\]: .*999 is out of range"),
        (
            {"prompt": "x", "continuations": ["a"], "prefix_token_id": "a"},
            "prefix_token_id: not an",
        ),
        ({"prompt": "x", "continuations": ["a"] * 1025}, "1,025 are more than 1,024"),
        ({"prompt": "x", "continuations": ["a"], "n": 2}, "n: unknown key"),
        ({"continuations": ["a"]}, "a prompt needs one of"),
        ("x", "not an object"),
    ],
)
def test_what_cannot_be_read_costs_one_request(llm, asked, words) -> None:
    with pytest.raises(RequestError, match=words):
        llm.add_score(asked)
    bad, good = llm.score([asked, item([1], [2])])
    assert bad.error.code == "invalid_field"
    assert good.error is None
