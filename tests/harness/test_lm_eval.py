"""The adapter for lm-evaluation-harness: equal to its transformers model, and each trap of its requests."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.filterwarnings("ignore")

import torch  # noqa: E402
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.api.model import CachingLM  # noqa: E402
from lm_eval.api.registry import get_model  # noqa: E402

import minivllm_engine  # noqa: E402
from minivllm_lm_eval import MiniVLLM  # noqa: E402
from minivllm_lm_eval import model as adapter  # noqa: E402
from support.transformers_oracle import TransformersOracle  # noqa: E402

PREFIX = 7
GREEDY = {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": False}


def asked(kind: str, *args: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, one, place) for place, one in enumerate(args)]


@pytest.fixture(scope="module")
def lm(tiny_model: Path) -> MiniVLLM:
    return MiniVLLM(
        str(tiny_model), device="cuda:0", max_model_len=256, prefix_token_id=PREFIX, max_num_seqs=4
    )


@pytest.fixture(scope="module")
def demo() -> MiniVLLM:
    return MiniVLLM("demo", max_num_seqs=4, max_model_len=1024)


class Plain(MiniVLLM):
    """What the harness's transformers model computes, one sequence a call, by the harness's own cuts."""

    def __init__(self, oracle: TransformersOracle, other: MiniVLLM) -> None:
        self.__dict__ |= vars(other)
        self.oracle = oracle

    def _score(self, pairs, take, *, disable: bool) -> None:
        for place, (context, ids) in enumerate(pairs):
            whole = [*context, *ids][-(self.max_length + 1) :]
            rows = self.oracle.logits(whole[:-1])[-len(ids) :].double().log_softmax(-1)
            values = rows.gather(1, torch.tensor(list(ids))[:, None])
            score = type("Score", (), {})()
            score.logprob = values.sum().item()
            score.is_greedy = rows.argmax(-1).tolist() == list(ids)
            take(place, score)


@pytest.fixture(scope="module")
def plain(lm: MiniVLLM, tiny_model: Path) -> Plain:
    return Plain(TransformersOracle(tiny_model), lm)


def test_it_is_registered_and_the_default_device_of_the_command_line_will_do(lm) -> None:
    assert get_model("minivllm") is MiniVLLM
    assert lm.llm.device == ("cuda" if torch.cuda.is_available() else "cpu")
    info = lm.get_model_info()
    assert info["max_length"] == 256
    assert info["model_dtype"] == "fp32"


def test_letters_texts_and_windows_are_those_of_transformers(lm, plain) -> None:
    rng = random.Random(3)

    def text(length: int) -> str:
        return "".join(rng.choice("abcdef ghi\n") for _ in range(length)) + "x"

    pairs: list[tuple[str, str]] = []
    for length in (5, 64, 130, 250, 300):
        context = text(length)
        pairs += [(context, f" {letter}") for letter in "ABCD"]
        pairs += [(context + " ", text(size)) for size in (3, 20)]
    pairs.append(("", "without a context"))
    requests = asked("loglikelihood", *pairs)
    found = lm.loglikelihood(requests, disable_tqdm=True)
    wanted = plain.loglikelihood(requests, disable_tqdm=True)
    assert [one[0] for one in found] == pytest.approx([one[0] for one in wanted], abs=2e-4)
    assert [one[1] for one in found] == [one[1] for one in wanted]
    rolling = asked("loglikelihood_rolling", (text(40),), (text(700),))
    sums = lm.loglikelihood_rolling(rolling, disable_tqdm=True)
    assert sums == pytest.approx(plain.loglikelihood_rolling(rolling, disable_tqdm=True), abs=5e-3)


def test_the_harness_runs_a_local_task_by_its_command_line(tiny_model, tmp_path) -> None:
    rows = [
        {"question": f"q{i}", "choices": ["A", "B", "C", "D"], "answer": i % 4} for i in range(6)
    ]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "letters.yaml").write_text(
        f"""task: letters
dataset_path: json
dataset_kwargs:
  data_files:
    test: {tmp_path}/test.jsonl
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}\\nAnswer:"
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - metric: acc
"""
    )
    environ = {
        **os.environ,
        "HF_DATASETS_OFFLINE": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "hf"),
        "PYTHONPATH": str(Path(minivllm_engine.__file__).parents[1]),
    }
    arguments = ["--model", "minivllm", "--tasks", "letters", "--include_path", str(tmp_path)]
    model = f"pretrained={tiny_model},max_num_seqs=2"
    output = ["--model_args", model, "--output_path", str(tmp_path / "out"), "--log_samples"]
    done = subprocess.run(
        [sys.executable, "-m", "minivllm_lm_eval", *arguments, *output],
        env=environ,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "acc" in done.stdout
    (result,) = (tmp_path / "out").rglob("results_*.json")
    document = json.loads(result.read_text())
    assert document["config"]["model"] == "minivllm"
    assert document["n-samples"]["letters"]["effective"] == 6


def test_letters_of_a_question_are_one_sequence(lm) -> None:
    lm.llm.clear_cache()
    before = lm.llm.stats().prompt_tokens_computed
    context = "A question of the tests, and its answer:" * 2
    lm.loglikelihood(asked("loglikelihood", *((context, x) for x in "ABCD")), disable_tqdm=True)
    assert lm.llm.stats().prompt_tokens_computed - before == len(context)


def test_a_token_across_the_join_is_scored_and_counted(demo, caplog) -> None:
    encode = demo.tokenizer.encode
    words = ("Answer:", "the", "Mean", "defin")
    pairs = [(a, b) for a in words for b in ("A", "re", "ing", "ition", "n")]
    spanned = [(a, b) for a, b in pairs if len(encode(a + b)) <= len(encode(a))]
    assert spanned, "no pair of these has a token across the join"
    found = demo.loglikelihood(asked("loglikelihood", *spanned), disable_tqdm=True)
    assert all(value < 0 for value, _ in found)
    assert demo.get_model_info()["continuations_cut_elsewhere"] == len(spanned)
    assert sum("share a token" in record.message for record in caplog.records) <= 1


def test_contexts_are_encoded_once(lm, monkeypatch) -> None:
    seen: list[str] = []
    encode = lm.tokenizer.encode

    def counted(text: str) -> list[int]:
        seen.append(text)
        return encode(text)

    monkeypatch.setattr(lm.tokenizer, "encode", counted)
    pairs = [("A context that is new", f" {x}") for x in "ABCD"]
    lm.loglikelihood(asked("loglikelihood", *pairs), disable_tqdm=True)
    assert seen.count("A context that is new") == 1


def test_an_interruption_loses_nothing_that_was_finished(lm, tmp_path, monkeypatch) -> None:
    database = str(tmp_path / "requests.db")
    requests = asked("loglikelihood", *((f"question {i}", " yes") for i in range(20)))
    whole = lm.loglikelihood(requests, disable_tqdm=True)
    cached = CachingLM(lm, database)
    step, steps = lm.llm.step, [0]

    def interrupted() -> Any:
        steps[0] += 1
        if steps[0] == 4:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(lm.llm, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cached.loglikelihood(requests)
    monkeypatch.setattr(lm.llm, "step", step)
    assert not lm.llm.has_unfinished
    asked_again: list[int] = []
    score = lm._score

    def counted(pairs, take, *, disable: bool) -> None:
        asked_again.append(len(pairs))
        score(pairs, take, disable=disable)

    monkeypatch.setattr(lm, "_score", counted)
    assert [tuple(one) for one in cached.loglikelihood(requests)] == whole
    assert 0 < asked_again[0] < 20
    lm.set_cache_hook(type("NoHook", (), {"add_partial": lambda *_: None})())


def test_answers_are_those_of_the_engine_without_its_generation_config(demo) -> None:
    contexts = ["Gated DeltaNet is", "A paged KV cache"]
    found = demo.generate_until(
        asked("generate_until", *((c, dict(GREEDY)) for c in contexts)), disable_tqdm=True
    )
    params = adapter.SamplingParams(
        temperature=0, max_tokens=12, stop=("\n\n",), repetition_penalty=1.0
    )
    assert found == [out.text for out in demo.llm.generate(contexts, params)]
    _, read = demo._read_generation("x", {**GREEDY, "until": ["", "\n", eos_text(demo)]})
    assert (read.stop, read.temperature) == (("\n",), 0)
    assert (read.repetition_penalty, read.presence_penalty, read.frequency_penalty) == (1, 0, 0)


def eos_text(lm: MiniVLLM) -> str:
    return lm.tokenizer.token_text(lm.eot_token_id)


def test_stops_are_looked_for_in_the_answer_and_cut_thinking_is_no_answer(demo) -> None:
    history = [{"role": "user", "content": "Define a prefix cache."}]
    text = demo.apply_chat_template(history)
    prompt, _ = demo._read_generation(text, dict(GREEDY))
    assert prompt["chat"] is True
    plain, _ = demo._read_generation("Define", dict(GREEDY))
    assert plain["chat"] is False
    opened = text + ("" if text.rstrip().endswith("<think>") else "<think>\n")
    with pytest.raises(ValueError, match="enable_thinking=False"):
        demo.loglikelihood(asked("loglikelihood", (opened, "A")), disable_tqdm=True)


def test_what_cannot_be_asked_is_named(lm, tiny_model) -> None:
    with pytest.raises(ValueError, match="max_seqs is no key"):
        MiniVLLM(str(tiny_model), max_seqs=3)
    with pytest.raises(ValueError, match="max_gen_toks 256 leaves no room below max_length 256"):
        lm.generate_until(asked("generate_until", ("x", {"max_gen_toks": 256})), disable_tqdm=True)
    with pytest.raises(ValueError, match="300 tokens, more than 256"):
        lm.loglikelihood(asked("loglikelihood", ("x", "y" * 300)), disable_tqdm=True)


def test_the_engine_knows_nothing_of_the_harness() -> None:
    files = list(Path(minivllm_engine.__file__).parent.rglob("*.py"))
    assert len(files) > 100
    assert not [path for path in files if "lm_eval" in path.read_text()]
