"""Question files of every kind, what is wrong with them, and a run with and without the prefix cache."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples/evaluate"))

import evaluate
from questions import BadQuestions, read_questions, request_lines

FILES = {
    "choices": '{"question": "q", "choices": ["x", "y"], "answer": "y", "subject": "s"}\n',
    "exact": '{"prompt": "p", "target": ["Yes", "Sure"]}\n',
    "ceval": "\ufeffid,question,A,B,C,D,answer\n0,问,一,二,三,四,C\n",
    "mmlu": '"a, b?",one,two,three,four,B\n',
    "gsm8k": '{"question": "How many?", "answer": "Lost.\\n#### -1,200"}\n',
}
GOLD = {"choices": 1, "exact": ("Yes", "Sure"), "ceval": 2, "mmlu": 1, "gsm8k": ("-1200",)}


@pytest.fixture
def file(tmp_path: Path):
    def write(task: str, text: str, name: str = "law_test") -> Path:
        path = tmp_path / f"{name}.{'csv' if task in ('ceval', 'mmlu') else 'jsonl'}"
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.mark.parametrize("task", FILES)
def test_every_kind_of_file(file, task: str) -> None:
    (question,) = read_questions(file(task, FILES[task]), task)
    assert question.gold == GOLD[task]
    (line,) = request_lines([question], task, [question])
    assert ("continuations" in line) == (task in ("choices", "ceval", "mmlu"))
    if task == "ceval":
        assert line["continuations"] == ["A", "B", "C", "D"]
        assert line["prompt"].endswith("问\nA. 一\nB. 二\nC. 三\nD. 四\n答案：")
        assert "答案：C\n\n" in line["prompt"]
    if task == "mmlu":
        assert line["continuations"] == [" A", " B", " C", " D"]
        assert line["prompt"].startswith("The following are multiple choice questions")
        assert " about law.\n\na, b?\nA. one" in line["prompt"]
    if task == "gsm8k":
        assert line["prompt"] == (
            "Question: How many?\nAnswer: Lost.\n#### -1,200\n\nQuestion: How many?\nAnswer:"
        )


@pytest.mark.parametrize(
    ("task", "text", "words"),
    [
        ("choices", '{"question": "q", "choices": ["x", "y"], "answer": 2}\n', ":1: the answer 2"),
        ("choices", FILES["choices"] + "{\n", ":2: not JSON"),
        (
            "choices",
            '{"question": "q", "choices": ["x"], "answer": 0}\n',
            ":1: choices: not a list",
        ),
        ("choices", "", "no questions"),
        ("exact", '{"id": 1, "prompt": "p", "target": "t"}\n' * 2, ":2: id 1 was used"),
        ("exact", '{"prompt": "p"}\n', ":1: no text under target"),
        ("mmlu", "q,one,two,B\n", ":1: 4 columns instead of 6"),
        ("ceval", "id,question,A,B,C,D\n0,q,a,b,c,d\n", ":2: no text under answer"),
        ("gsm8k", '{"question": "q", "answer": "72"}\n', ":1: the answer has no number behind"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(file, task: str, text: str, words: str) -> None:
    with pytest.raises(BadQuestions, match=words):
        read_questions(file(task, text), task)


def record(index: int, *logprobs: float) -> dict[str, Any]:
    scores = [{"logprob": value} for value in logprobs]
    return {"index": index, "status": "ok", "scores": scores, "usage": {"cached_tokens": 0}}


def run_with(monkeypatch, warm: list[dict], cold: list[dict]) -> None:
    def run(model: str, requests: Path, output: Path, extra: list[str]) -> list[dict[str, Any]]:
        return cold if "cache.prefix_cache=false" in extra else warm

    monkeypatch.setattr(evaluate, "run", run)


def test_the_cache_must_not_change_an_answer_but_a_tie(file, monkeypatch, tmp_path, capsys) -> None:
    path = file("choices", FILES["choices"] * 2)
    out = tmp_path / "out"
    arguments = ["demo", str(path), "--task", "choices", "--out", str(out), "--compare-cache"]
    warm = [record(0, -2.0, -1.0), record(1, -1.0, -1.00001)]
    run_with(monkeypatch, warm, [record(0, -2.0, -1.0), record(1, -1.00001, -1.0)])
    assert evaluate.main(arguments) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["n"], document["correct"]) == (2, 1)
    assert document["cache"]["different"] == []
    run_with(monkeypatch, warm, [record(0, -1.0, -2.0), record(1, -1.0, -1.00001)])
    assert evaluate.main(arguments) == 5
    document = json.loads(capsys.readouterr().out)
    assert document["cache"]["different"] == ["law_test-1"]
    assert document["cache"]["largest_gap"] == 1.0
    run_with(monkeypatch, [record(0, -1.0, -2.0), record(1, -1.0, -2.0)], [])
    other = ["--against", str(out / "items.jsonl")]
    assert evaluate.main([*arguments[:-1], *other]) == 0
    against = json.loads(capsys.readouterr().out)["against"]
    assert against == {"only_this": 0, "only_other": 1, "p": 1.0}


def test_examples_never_come_from_the_graded_file(file, tmp_path, capsys) -> None:
    path = file("choices", FILES["choices"])
    arguments = ["demo", str(path), "--task", "choices", "--out", str(tmp_path / "out")]
    assert evaluate.main([*arguments, "--dev", str(path), "--shots", "1"]) == 2
    assert "must not come from the graded file" in capsys.readouterr().err
    dev = file("choices", FILES["choices"], "dev")
    assert evaluate.main([*arguments, "--dev", str(dev), "--shots", "2"]) == 2
    assert "--shots 2: --dev has 1 examples" in capsys.readouterr().err


def test_failures_are_wrong_and_cut_answers_are_told_first() -> None:
    items = [
        {"subject": "", "answer": None, "correct": None, "error": "prompt_too_long"},
        {"subject": "", "answer": "1", "correct": True, "finish_reason": "length"},
    ]
    document = evaluate.results_of(items)
    assert next(iter(document)) == "warning"
    assert (document["n"], document["correct"], document["failed"]) == (2, 1, 1)
    assert document["unparsed"] == 0
