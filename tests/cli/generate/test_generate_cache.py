"""What `generate` says of the prefix cache: records, totals, advice."""

import json
from pathlib import Path
from typing import Any

import pytest

from cli.program import REAL, Program
from minivllm_cli.batch.remedies import Remedies
from minivllm_cli.batch.report import render_summary
from minivllm_cli.batch.tally import Tally
from minivllm_cli.config.settings import resolve_settings
from minivllm_engine.checkpoint.index import resolve_model
from minivllm_engine.core.outputs import (
    CompletionOutput,
    Divergence,
    FinishReason,
    RequestOutput,
    Timing,
    Usage,
)
from minivllm_engine.core.sampling_params import ResolvedSampling, SamplingParams
from minivllm_engine.core.stats import EngineStats
from minivllm_engine.memory.devices import DeviceMemory
from minivllm_engine.protocol.lines import BatchLine, RequestLine
from minivllm_engine.protocol.records import ok_record
from support.byte_tokenizer import byte_tokenizer

HEADER = "A header that all prompts share, and that is longer than a block is. " * 2


def _stats(**values: int) -> EngineStats:
    names = [name for name, f in EngineStats.__dataclass_fields__.items() if f.type is int]
    return EngineStats(**(dict.fromkeys(names, 0) | values))


def _output(usage: Usage) -> RequestOutput:
    return RequestOutput(
        request_id="r",
        prompt_token_ids=[],
        outputs=[CompletionOutput(0, finish_reason=FinishReason.STOP)],
        usage=usage,
        timing=Timing(),
        params=ResolvedSampling(seed=0),
        finished=True,
    )


@pytest.mark.parametrize("batch", [None, BatchLine("c", "/v1/chat/completions", "m")])
def test_a_record_says_where_a_chat_was_told_otherwise(batch: BatchLine | None) -> None:
    usage = Usage(1690, 412, 0, 1152, 1152, 1152, "template_divergence", Divergence(1184, 65, 66))
    line = RequestLine(1, 0, "a", "messages", [], SamplingParams(), batch=batch)
    tokenizer = byte_tokenizer()
    record = ok_record(line, _output(usage), params=ResolvedSampling(0), tokenizer=tokenizer)
    answer = record if batch is None else record["response"]["body"]
    found = answer["usage"].get("prompt_tokens_details", answer["usage"])
    assert {k: found[k] for k in ("cached_tokens", "kv_matched", "state_at", "miss_reason")} == {
        "cached_tokens": 1152,
        "kv_matched": 1152,
        "state_at": 1152,
        "miss_reason": "template_divergence",
    }
    assert found["divergence"] == {
        "position": 1184,
        "cached_id": 65,
        "cached_token": "A",
        "prompt_id": 66,
        "prompt_token": "B",
    }


def _summed(records: list[dict[str, Any]], key: str) -> int:
    return sum(record["usage"].get(key, 0) for record in records)


def _check_totals(records: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    assert summary["tokens"]["in"] == _summed(records, "prompt_tokens")
    assert summary["tokens"]["cached"] == _summed(records, "cached_tokens") > 0
    assert summary["tokens"]["out"] == _summed(records, "completion_tokens")
    assert summary["cache"]["kv_matched"] == _summed(records, "kv_matched")
    reasons = [record["usage"]["miss_reason"] for record in records]
    counts = {reason: reasons.count(reason) for reason in set(reasons) - {None}}
    assert summary["cache"]["misses"] == counts
    hit = summary["tokens"]["cached"] / summary["tokens"]["in"]
    assert summary["cache"]["hit"] == pytest.approx(hit, abs=1e-4)


@pytest.mark.parametrize("verify", [[], ["--verify", "2"]])
def test_c14_totals_are_the_sums_of_the_records(
    program: Program, fake_model: Path, verify: list[str]
) -> None:
    lines: list[dict[str, Any]] = [{"prompt": f"{HEADER}{i}\nsay {i}"} for i in range(6)]
    lines += [{"prompt": "say x"}, {"prompt": f"{HEADER}\nnan"}]
    lines += [{"prompt": f"{HEADER}9\nsay 9", "prefix_cache": False}]
    source = program.write_lines("in", lines)
    done = program.run("generate", fake_model, "-i", source, "-v", "--summary", "s.json", *verify)
    assert done.code == 3
    _check_totals(done.records, json.loads((program.home / "s.json").read_text()))
    failed = done.records[7]
    assert (failed["status"], failed["usage"]["cached_tokens"]) == ("error", 128)
    assert done.records[8]["usage"]["miss_reason"] == "disabled"
    assert "misses: new_prefix 1, below_granularity 1, disabled 1" in done.err
    assert "snap 2/32" in done.err


def test_c14_the_real_engine_counts_as_its_records_do(program: Program, tiny_model: Path) -> None:
    program.command = REAL
    lines = [{"prompt": f"{HEADER}{i}", "max_tokens": 3, "n": 1 + i % 2} for i in range(6)]
    source = program.write_lines("in", lines)
    done = program.run(
        "generate", tiny_model, "-i", source, "--max-num-seqs", "2", "--summary", "s.json"
    )
    assert done.code == 0
    summary = json.loads((program.home / "s.json").read_text())
    _check_totals(done.records, summary)
    assert summary["cache"]["restored"] == 3 * 128, "further outputs start where the first one does"
    assert summary["peak"]["snapshots"] > 0
    assert _summed(done.records, "cached_tokens") == 5 * 128


def test_a_line_can_do_without_the_cache(program: Program, fake_model: Path) -> None:
    source = program.write_lines("in", [{"prompt": HEADER}, {"prompt": HEADER}])
    done = program.run("generate", fake_model, "-i", source, "--force-param", "prefix_cache=false")
    assert [r["usage"]["miss_reason"] for r in done.records] == ["disabled"] * 2


def test_h19_prompt_logprobs_stand_in_the_record(program: Program, fake_model: Path) -> None:
    lines = [
        {"id": "a", "prompt": HEADER},
        {"id": "b", "prompt": HEADER, "prompt_logprobs": 3},
        {"id": "c", "prompt": HEADER},
    ]
    source = program.write_lines("in", lines)
    done = program.run("generate", fake_model, "-i", source)
    a, b, c = done.records
    assert "prompt_logprobs" not in a and "prompt_logprobs" not in c
    assert (b["usage"]["cached_tokens"], b["usage"]["miss_reason"]) == (0, "disabled")
    first, second, *_ = b["prompt_logprobs"]
    assert first is None
    assert len(b["prompt_logprobs"]) == b["usage"]["prompt_tokens"]
    assert (second["token"], second["logprob"], second["rank"]) == (HEADER[1], -0.5, 1)
    assert [t["logprob"] for t in second["top"]] == [-0.5, -9999.0, -9999.0]
    assert c["usage"]["cached_tokens"] == 128
    flag = program.run("generate", fake_model, "-i", source, "--prompt-logprobs", "1")
    assert [len(r["prompt_logprobs"][1]["top"]) for r in flag.records] == [1, 3, 1]


def test_h19_a_batch_line_has_them_in_its_body(program: Program, fake_model: Path) -> None:
    body = {"messages": [{"role": "user", "content": "say x"}], "prompt_logprobs": 1}
    line = {"custom_id": "r", "method": "POST", "url": "/v1/chat/completions", "body": body}
    source = program.write_lines("in", [line])
    (record,) = program.run("generate", fake_model, "-i", source).records
    answer = record["response"]["body"]
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert answer["usage"]["prompt_tokens_details"]["miss_reason"] == "disabled"


def _tally(num_run: int, stats: EngineStats, **misses: int) -> Tally:
    tally = Tally(num_run=num_run, stats=stats)
    tally.misses.update(misses)
    return tally


class TestAdvice:
    """The demo model: a snapshot takes 444 KiB."""

    @staticmethod
    def _remedies(*assignments: str) -> Remedies:
        settings = resolve_settings(assignments=assignments, environ={})
        return Remedies(settings, resolve_model("demo"))

    def test_the_engine_itself_does_not_stand_in_the_way(self) -> None:
        """On a GPU its own memory would look like another program's."""
        settings = resolve_settings(environ={})
        for size, fits in ((8 << 30, True), (1 << 30, False)):
            device = DeviceMemory("cuda", "GPU", size)
            text = Remedies(settings, resolve_model("demo"), device).for_long_prompt(4000)
            assert ("max_model_len" in text) is fits

    def test_more_snapshots_where_they_were_given_up(self) -> None:
        remedies = self._remedies("cache.snapshot_memory=2MiB", "engine.cpu_memory=1GiB")
        lost = _tally(100, _stats(snapshots_evicted=9), evicted=15, no_snapshot=15)
        text = remedies.advice(lost)
        assert text is not None
        assert text.startswith("30 of 100 prompts found their beginning given up; ")
        assert text.endswith("--set cache.snapshot_memory=4MiB fits")
        assert remedies.advice(_tally(100, _stats(snapshots_evicted=9), evicted=15)) is None

    def test_more_blocks_where_these_were_given_up(self) -> None:
        remedies = self._remedies("cache.num_blocks=100", "engine.cpu_memory=1GiB")
        text = remedies.advice(_tally(10, _stats(blocks_evicted=9), evicted=5))
        assert text is not None and text.endswith("--set cache.num_blocks=200 fits")

    def test_nothing_that_would_not_fit(self, caplog: pytest.LogCaptureFixture) -> None:
        remedies = self._remedies("engine.cpu_memory=64MiB", "cache.snapshot_memory=50MiB")
        lost = _tally(10, _stats(snapshots_evicted=9), evicted=5)
        assert remedies.advice(lost) is None
        assert "lowered" not in caplog.text, "what would be is nothing to warn of"

    def test_finer_blocks_where_prompts_are_too_short(self) -> None:
        short = _tally(10, _stats(), below_granularity=6)
        text = self._remedies("cache.block_size=256").advice(short)
        assert text is not None and "in units of 256 tokens" in text
        assert text.endswith("--set cache.block_size=64 fits")
        assert self._remedies().advice(short) is None, "64 is the finest there is"


def test_the_summary_tells_reuse_from_restoring() -> None:
    tally = _tally(2, _stats(snapshots_peak=18, snapshots_total=32, restored_tokens=640))
    tally.add_output(_output(Usage(100, 5, 0, 64, 64, 64, None)))
    tally.add_output(_output(Usage(60, 5, 0, 0, 0, 0, "below_granularity")))
    text = "\n".join(render_summary(tally, {"prompt": 2}, 0, None, all_of_it=True))
    assert "in 160 = 64 reused + 96 new · out 10" in text
    assert (
        "hit 40% · misses: below_granularity 1 · "
        "restored 640 tokens after preemptions and for further outputs"
    ) in text
    assert "snap 18/32" in text
