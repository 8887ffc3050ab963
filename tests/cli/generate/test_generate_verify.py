"""`--verify N`: replays from nothing, their verdicts, and a planted bug that they find."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from cli.program import REAL, Program, read_records
from minivllm_cli.batch.verify import Tolerance, compare, tolerance_of
from minivllm_engine.core.outputs import CompletionOutput, PositionLogprobs, TokenLogprob
from minivllm_engine.core.sampling_params import ResolvedSampling
from minivllm_engine.tensors.cache_pool import CachePool

HEADER = "A header that all prompts share, and that is longer than a block is. " * 2
FP32 = Tolerance(2e-4, 1e-4)
GREEDY = ResolvedSampling(seed=0, temperature=0.0)


def _steps(*steps: list[tuple[int, float]]) -> CompletionOutput:
    """An output: at each step the sampled token first, then the others, as (id, logprob)."""
    logprobs = []
    for step in steps:
        best = sorted(step, key=lambda pair: -pair[1])
        top = tuple(TokenLogprob(i, value, rank) for rank, (i, value) in enumerate(best, start=1))
        sampled = next(token for token in top if token.token_id == step[0][0])
        logprobs.append(PositionLogprobs(sampled, top))
    return CompletionOutput(0, token_ids=[step[0][0] for step in steps], logprobs=logprobs)


SAME = [(1, -0.5), (2, -1.5), (3, -2.5)]


class TestComparison:
    def test_equal_answers_and_their_largest_gap(self) -> None:
        other = [(1, -0.5001), (2, -1.5), (4, -2.5)]
        found = compare(_steps(SAME, SAME), _steps(SAME, other), GREEDY, FP32)
        assert (found.verdict, found.position) == ("equal", None)
        assert found.gap == pytest.approx(1e-4)

    def test_the_same_tokens_from_other_logits_differ(self) -> None:
        other = [(1, -0.5), (2, -1.7), (3, -2.5)]
        found = compare(_steps(SAME), _steps(other), GREEDY, FP32)
        assert (found.verdict, found.position) == ("different", None)
        assert found.gap == pytest.approx(0.2)

    def test_another_token_differs_and_what_follows_it_is_not_looked_at(self) -> None:
        other, later = [(2, -0.4), (1, -0.9), (3, -2.5)], [(9, -9.0), (1, -20.0), (2, -20.0)]
        found = compare(_steps(SAME, SAME, later), _steps(SAME, other, SAME), GREEDY, FP32)
        assert (found.verdict, found.position, found.warm, found.cold) == ("different", 1, 1, 2)
        assert found.gap == pytest.approx(1.1)

    @pytest.mark.parametrize(("gap", "verdict"), [(9e-5, "tie"), (1.1e-4, "different")])
    def test_the_cold_runs_candidates_decide_what_is_a_tie(self, gap: float, verdict: str) -> None:
        warm = [(1, -0.5), (2, -0.5 - 1e-6)]
        cold = [(2, -0.5), (1, -0.5 - gap)]
        assert compare(_steps(warm), _steps(cold), GREEDY, FP32).verdict == verdict

    def test_close_candidates_do_not_excuse_logits_that_differ_before(self) -> None:
        warm, cold = [(1, -0.5), (2, -0.5)], [(2, -0.5), (1, -0.5)]
        blurred = [(1, -0.9), (2, -1.5), (3, -2.5)]
        found = compare(_steps(SAME, warm), _steps(blurred, cold), GREEDY, FP32)
        assert (found.verdict, found.position) == ("different", 1)

    def test_a_token_that_only_one_run_finds_likely_is_a_gap(self) -> None:
        other = [(1, -0.5), (9, -0.7), (2, -1.5)]
        found = compare(_steps(SAME), _steps(other), GREEDY, FP32)
        assert found.verdict == "different"
        assert found.gap == pytest.approx(1.8), "9 is at most as likely as the last of the others"

    def test_a_candidate_that_is_not_among_the_likeliest_is_no_tie(self) -> None:
        warm, cold = [(7, -0.5)], [(2, -0.5), (1, -0.6)]
        assert compare(_steps(warm), _steps(cold), GREEDY, FP32).verdict == "different"

    @pytest.mark.parametrize(("token", "verdict"), [(2, "tie"), (3, "different")])
    def test_a_draw_on_an_edge_is_a_tie_between_neighbours(self, token: int, verdict: str) -> None:
        drawn = [(token, dict(SAME)[token]), *(pair for pair in SAME if pair[0] != token)]
        hot = ResolvedSampling(seed=0, temperature=0.8)
        assert compare(_steps(SAME), _steps(drawn), hot, FP32).verdict == verdict
        assert compare(_steps(SAME), _steps(drawn), GREEDY, FP32).verdict == "different"

    def test_one_that_ends_earlier_differs(self) -> None:
        found = compare(_steps(SAME, SAME), _steps(SAME), GREEDY, FP32)
        assert (found.verdict, found.position, found.warm, found.cold) == ("different", 1, 1, None)

    def test_the_coarser_type_sets_the_tolerance(self) -> None:
        assert tolerance_of("fp32", "fp32") == FP32
        assert tolerance_of("fp32", "bf16") == tolerance_of("bf16", "fp32")
        assert tolerance_of("bf16", "bf16").gap > tolerance_of("fp16", "fp32").gap > FP32.gap


def _lines(*scripts: str) -> list[dict[str, Any]]:
    return [{"id": f"q{i}", "prompt": f"{HEADER}\n{script}"} for i, script in enumerate(scripts)]


def _verify(program: Program, model: Path, lines: list[Any], *args: str) -> tuple[Any, Any]:
    source = program.write_lines("in", lines)
    done = program.run("generate", model, "-i", source, "--summary", "s.json", *args)
    return done, json.loads((program.home / "s.json").read_text())


def _without_times(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: record[key] for key in record if key != "timing"} for record in records]


def _without_logprobs(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A replay beside it rounds a request's logits otherwise, and changes no token."""
    outputs = [[{**o, "logprobs": None} for o in record["outputs"]] for record in records]
    return [{**r, "outputs": o} for r, o in zip(_without_times(records), outputs, strict=True)]


def test_every_nth_reused_request_is_replayed_cold(program: Program, fake_model: Path) -> None:
    lines = _lines(*(f"seeded {i}" for i in range(8)))
    lines[3] |= {"n": 2, "logprobs": 1}
    lines[5] |= {"seed": 77, "logprobs": 6}
    plain, _ = _verify(program, fake_model, lines)
    program.forget_engine()
    done, summary = _verify(program, fake_model, lines, "--verify", "3")
    assert done.code == 0
    assert summary["verify"] == {
        "reused": 7,
        "replayed": 2,
        "equal": 2,
        "ties": 0,
        "different": 0,
        "largest_gap": 0.0,
    }
    assert "2 of 7 that reused a prefix: 2 equal · 0 different" in done.err
    replays = [entry["params"] for entry in program.added if not entry["params"]["prefix_cache"]]
    asked = [(entry["params"]["seed"], entry["params"]["n"]) for entry in program.added[:8]]
    assert asked[3] == (3, 2)
    assert len(replays) == 2 and {(p["seed"], p["n"]) for p in replays} <= set(asked)
    # The records are those of a run without it.
    assert _without_times(done.records) == _without_times(plain.records)


@pytest.mark.parametrize(
    ("script", "code", "counts"),
    [
        ("drifts", 5, {"equal": 0, "ties": 0, "different": 1}),
        ("blurs", 5, {"equal": 0, "ties": 0, "different": 1}),
        ("ties", 0, {"equal": 0, "ties": 1, "different": 0}),
        ("say x", 0, {"equal": 1, "ties": 0, "different": 0}),
    ],
)
def test_verdicts(
    program: Program, fake_model: Path, script: str, code: int, counts: dict[str, int]
) -> None:
    lines = [line | {"temperature": 0} for line in _lines("say y", script)]
    done, summary = _verify(program, fake_model, lines, "--verify", "1")
    assert done.code == code
    assert {name: summary["verify"][name] for name in counts} == counts
    assert all(record["status"] == "ok" for record in done.records)
    if script == "drifts":
        assert (
            "error: verify: line 2 (q1): the answer differs from its cold replay at token 0: "
            in (done.err)
        )
        assert "'w' instead of 'c'" in done.err
    if script == "blurs":
        assert "has the same tokens as its cold replay, from other logits" in done.err
        assert "why: largest logit gap 0.25, allowed 0.0002; 128 of " in done.err
        assert "error: --verify: 1 of 1 replays differ" in done.err
    if script == "ties":
        assert "verify: line 2 (q1): the answer differs" in done.err
        assert "a tie, within rounding" in done.err
        assert "error" not in done.err


def test_a_failed_check_counts_for_more_than_a_failed_line(
    program: Program, fake_model: Path
) -> None:
    done, _ = _verify(program, fake_model, _lines("say y", "drifts", "nan"), "--verify", "1")
    assert done.code == 5
    assert "1 of 3 requests failed: non_finite_logits 1" in done.err


def test_a_run_in_which_nothing_was_reused_says_so(program: Program, fake_model: Path) -> None:
    done, summary = _verify(program, fake_model, _lines("say y"), "--verify", "1")
    assert (done.code, summary["verify"]["replayed"]) == (0, 0)
    assert "warning: --verify: nothing was replayed: 0 requests reused a prefix" in done.err


@pytest.mark.parametrize(
    ("args", "what"),
    [
        (["-i", "in", "--verify", "0"], "--verify 0: should be at least 1"),
        (["-p", "x", "--verify", "1"], "--verify goes with --input"),
        (["-i", "in", "--verify", "1", "--dry-run"], "--verify has no answers of a --dry-run"),
        (["-p", "x", "--prompt-logprobs", "1"], "--prompt-logprobs needs records"),
        (["-i", "in", "--prompt-logprobs", "101"], "--prompt-logprobs: "),
    ],
)
def test_what_cannot_be_verified_is_refused(
    program: Program, fake_model: Path, args: list[str], what: str
) -> None:
    program.write_lines("in", _lines("say y"))
    done = program.run("generate", fake_model, *args)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: {what}")


def _real_lines() -> list[dict[str, Any]]:
    chat = [{"role": "system", "content": HEADER}, {"role": "user", "content": "?"}]
    kinds: list[dict[str, Any]] = [
        {"prompt": HEADER + "a"},
        {"prompt": HEADER + "b", "n": 2, "temperature": 0.9},
        {"prompt": HEADER + "c", "repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"prompt": HEADER + "d", "stop": ["e", "f", "g", "h"], "logprobs": 2},
        {"prompt_token_ids": [65] * 140, "min_tokens": 3},
        {"messages": chat, "temperature": 0.7, "top_p": 0.9},
    ]
    return [
        kind | {"id": f"{kind_number}-{i}", "max_tokens": 6}
        for i in range(2)
        for kind_number, kind in enumerate(kinds)
    ]


def test_the_real_engine_answers_cold_as_warm(program: Program, tiny_model: Path) -> None:
    program.command = REAL
    args = ["--max-num-seqs", "3", "--cache-dump"]
    plain, before = _verify(program, tiny_model, _real_lines(), *args, "plain.json")
    more = ["verified.json", "--verify", "1"]
    done, after = _verify(program, tiny_model, _real_lines(), *args, *more)
    assert done.code == 0, done.err
    assert after["verify"]["replayed"] == after["verify"]["reused"] >= 9
    assert after["verify"]["equal"] == after["verify"]["replayed"]
    assert after["verify"]["largest_gap"] < FP32.gap
    for key in ("tokens", "cache"):
        assert after[key] == before[key], "replays are in no total, and leave nothing in the cache"
    dumps = [json.loads((program.home / f"{n}.json").read_text()) for n in ("plain", "verified")]
    for key in ("hit", "miss_counts", "nodes"):
        assert dumps[0][key] == dumps[1][key]
    assert _without_logprobs(done.records) == _without_logprobs(plain.records)


def test_a_snapshot_that_lost_its_state_is_found(
    program: Program, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = CachePool.save

    def save_badly(self: CachePool, slots: Any, snapshots: Any) -> None:
        save(self, slots, snapshots)
        for tensor in self.recurrent_snapshots:
            tensor[list(snapshots)] = 0

    monkeypatch.setattr(CachePool, "save", save_badly)
    program.command = REAL
    lines = [{"prompt": HEADER + letter, "max_tokens": 6, "temperature": 0} for letter in "abc"]
    silent, _ = _verify(program, tiny_model, lines, "--max-num-seqs", "1")
    assert silent.code == 0, "without the check it is a silent wrong answer"
    done, summary = _verify(program, tiny_model, lines, "--max-num-seqs", "1", "--verify", "1")
    assert done.code == 5
    assert summary["verify"]["different"] == summary["verify"]["replayed"] == 2
    assert summary["verify"]["largest_gap"] > 0.01
    assert "error: verify: line 2 (line-000002): " in done.err
    assert len(done.records) == 3


def test_an_interrupt_drops_replays_and_leaves_records_as_asked(
    program: Program, fake_model: Path
) -> None:
    source = program.write_lines("in", _lines(*["count 30"] * 24))
    args = ["generate", fake_model, "-i", source, "-o", "out", "--verify", "1"]
    args += ["--max-num-seqs", "3"]
    process = program.start(*args, FAKE_STEP_SECONDS="0.02")
    partial = program.home / "out.partial"
    program.interrupt_when(
        lambda: partial.exists() and partial.read_bytes().count(b"\n") > 4, process, signal.SIGINT
    )
    stopped = program.finish(process)
    assert stopped.code == 130, stopped.err
    done = program.run(*args)
    assert done.code == 0
    assert "resuming: " in done.err
    records = read_records(program.home / "out")
    assert [r["id"] for r in records] == [f"q{i}" for i in range(24)]
    outputs = [record["outputs"][0] for record in records]
    assert all(output["token_ids"] is output["logprobs"] is None for output in outputs)
