"""Lines with continuations: their records are scores, and journal, dry run and --verify know them."""

import json
from pathlib import Path
from typing import Any

import pytest

from cli.program import REAL, Program, read_records
from minivllm_engine import LLM
from minivllm_engine.runner.scoring import ScoreHandle

HEADER = "A header that all the questions share, which is longer than a block is. " * 2
LINES: list[dict[str, Any]] = [
    {
        "id": f"q{number}",
        "prompt": f"{HEADER}Question {number}\nAnswer:",
        "continuations": [" A", " B"],
        "answer": 1,
        "subject": "law",
    }
    for number in range(3)
]
ROLLING = {"id": "t", "prompt": "", "continuations": ["a whole text"]}


@pytest.fixture
def lines(tmp_path: Path):
    def write(*documents: dict[str, Any]) -> Path:
        path = tmp_path / "in.jsonl"
        path.write_text("".join(json.dumps(one) + "\n" for one in documents))
        return path

    return write


@pytest.fixture
def real(program: Program, tiny_model: Path):
    program.command = REAL
    program.timeout = 60

    def run(path: Path, *args: str):
        return program.run("generate", tiny_model, "-i", path, "-o", path.parent / "out", *args)

    return run


def test_records_hold_the_scores_of_the_engine(real, lines, tiny_model, tmp_path) -> None:
    answer = {"id": "a", "prompt": "Hello", "max_tokens": 2}
    finished = real(lines(*LINES, ROLLING, answer))
    assert finished.code == 0, finished.err
    records = {record["id"]: record for record in read_records(tmp_path / "out")}
    with LLM(tiny_model) as llm:
        keys = ("prompt", "continuations")
        outs = llm.score([{key: one[key] for key in keys} for one in (*LINES, ROLLING)])
    for line, out in zip((*LINES, ROLLING), outs, strict=True):
        record = records[line["id"]]
        assert record["status"] == "ok"
        assert "outputs" not in record
        assert "sampling" not in record
        for found, score in zip(record["scores"], out.scores, strict=True):
            assert found["index"] == score.index
            assert found["logprob"] == pytest.approx(score.logprob, abs=1e-3)
            assert found["token_logprobs"] == [
                None if value is None else pytest.approx(value, abs=1e-4)
                for value in score.logprobs
            ]
            assert found["token_ids"] == list(score.token_ids)
            assert found["is_greedy"] == score.is_greedy
            assert found["num_bytes"] == score.num_bytes
        assert record["usage"]["scored_tokens"] == out.usage.scored_tokens
    assert records["q1"]["meta"] == {"answer": 1, "subject": "law"}
    assert records["t"]["scores"][0]["token_logprobs"][0] is None
    assert len(records["a"]["outputs"]) == 1
    assert "scored_tokens" not in records["a"]["usage"]


def test_what_is_wrong_with_a_line_costs_that_line(real, lines, tmp_path) -> None:
    bad = [
        {**LINES[0], "id": "sampled", "temperature": 0},
        {**LINES[0], "id": "nested", "sampling": {"top_p": 0.5}},
        {**LINES[0], "id": "none", "continuations": []},
        {"id": "empty", "prompt": "", "max_tokens": 3},
    ]
    finished = real(lines(*bad, LINES[1]))
    assert finished.code == 3, finished.err
    records = {record["id"]: record for record in read_records(tmp_path / "out")}
    codes = {name: (record["error"] or {}).get("code") for name, record in records.items()}
    assert codes == {
        "sampled": "invalid_field",
        "nested": "invalid_field",
        "none": "invalid_field",
        "empty": "empty_prompt",
        "q1": None,
    }
    assert "temperature" in records["sampled"]["error"]["message"]


def test_a_dry_run_counts_them(real, lines) -> None:
    finished = real(lines(*LINES), "--dry-run", "--json")
    assert finished.code == 0, finished.err
    document = json.loads(finished.out)
    assert document["refused"] == 0
    assert document["sequences"] == 3


def test_verify_compares_logprobs(real, lines, monkeypatch, tmp_path) -> None:
    first = real(lines(*LINES), "--verify", "1")
    assert first.code == 0, first.err
    assert "2 of 2 that reused a prefix: 2 equal" in first.err
    results = ScoreHandle.results

    def wrong(handle: ScoreHandle) -> list[Any]:
        return [
            row._replace(logprobs=tuple(value - wrong.calls * 0.1 for value in row.logprobs))
            for row in results(handle)
            if not setattr(wrong, "calls", wrong.calls + 1)
        ]

    wrong.calls = 0
    monkeypatch.setattr(ScoreHandle, "results", wrong)
    second = real(lines(*LINES), "--verify", "1", "--overwrite")
    assert second.code == 5, second.err
    assert "continuation 0 has other logprobs than in its cold replay" in second.err
