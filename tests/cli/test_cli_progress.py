"""Progress in its styles, and what is measured for it."""

import io
import json
import re
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from rich.console import Console as RichConsole

from cli.chat.terminal import Terminal
from cli.program import Program
from minivllm_cli.console import progress
from minivllm_cli.console.bar import Bar
from minivllm_cli.console.progress import (
    BarOnTerminal,
    JsonLines,
    PlainLines,
    Progress,
    RateMeter,
    Silent,
    clock,
    make_reporter,
    plain_line,
    short_count,
)
from minivllm_cli.console.signals import Interrupts
from minivllm_cli.console.streams import Console
from minivllm_engine.core.stats import EngineStats


class _Recorder(Console):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.lines: list[str] = []

    def write_line(self, text: str) -> None:
        self.lines.append(text)

    def event(self, event: str, **fields: Any) -> None:
        self.lines.append(json.dumps({"event": event, **fields}))


def _stats(**values: Any) -> EngineStats:
    zeros = dict.fromkeys(
        (
            "num_running",
            "num_waiting",
            "kv_blocks_used",
            "kv_blocks_total",
            "kv_blocks_peak",
            "state_slots_used",
            "state_slots_total",
            "state_slots_peak",
            "num_preemptions",
            "num_steps",
            "prompt_tokens_computed",
            "output_tokens",
        ),
        0,
    )
    return EngineStats(**{**zeros, **values})


class TestPlain:
    def test_a_line_at_each_tenth_and_no_more(self) -> None:
        console = _Recorder()
        reporter = PlainLines(console)
        for done in range(1001):
            reporter.update(Progress("generate", done, 1000))
        shown = [line.split()[1] for line in console.lines]
        assert shown == [f"{n:,}/1,000" for n in range(0, 1001, 100)]

    def test_a_line_each_ten_seconds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now = [0.0]
        monkeypatch.setattr("time.monotonic", lambda: now[0])
        console = _Recorder()
        reporter = PlainLines(console)
        for second in range(61):
            now[0] = 1000.0 + second
            reporter.update(Progress("generate", 0, 1000))
        assert len(console.lines) == 7

    def test_loading_a_small_model_is_two_lines(self) -> None:
        console = _Recorder()
        reporter = PlainLines(console)
        for done in range(12):
            reporter.update(Progress("weights", done, 11))
        assert console.lines == ["weights 0/11 (0%)", "weights 11/11 (100%)"]

    def test_the_words(self) -> None:
        progress = Progress(
            "generate", 812, 1000, failed=3, out_tok_s=6800, in_tok_s=41_200, eta_s=41
        )
        assert plain_line(progress) == (
            "generate 812/1,000 81%  err 3  out 6.8k tok/s  in 41.2k tok/s  ETA 0:41"
        )
        progress.prefill = (4096, 14_490)
        assert "prompt 4,096/14,490 (28%)" in plain_line(progress)

    def test_reuse_and_each_pool_by_itself(self) -> None:
        progress = Progress("generate", 1, 2, in_tok_s=41_200, hit=0.384)
        progress.stats = _stats(
            kv_blocks_used=71,
            kv_blocks_total=100,
            state_slots_used=64,
            state_slots_total=64,
            snapshots_used=18,
            snapshots_total=32,
        )
        assert plain_line(progress) == (
            "generate 1/2 50%  err 0  out 0.0 tok/s  in 41.2k tok/s (hit 38%)"
            "  KV 71%  state 64/64  snap 18/32"
        )
        progress.stats, progress.hit = _stats(kv_blocks_total=100, state_slots_total=64), None
        assert plain_line(progress).endswith("in 41.2k tok/s  KV 0%  state 0/64"), "no cache"


def test_json_events_have_the_fields_of_the_contract() -> None:
    console = _Recorder()
    reporter = JsonLines(console)
    progress = Progress(
        "generate", 812, 1000, failed=3, out_tok_s=6800.04, in_tok_s=41200.0, eta_s=41.4
    )
    reporter.update(progress)
    reporter.update(progress)
    (line,) = console.lines
    assert json.loads(line) == {
        "event": "progress",
        "phase": "generate",
        "done": 812,
        "total": 1000,
        "failed": 3,
        "out_tok_s": 6800.0,
        "in_tok_s": 41200.0,
        "eta_s": 41,
    }


def test_a_phase_measured_in_bytes_shows_its_rate_and_the_time_left() -> None:
    gib = 1 << 30
    progress = Progress(
        "write", 3 * gib, 12 * gib, detail="shard 3/11", bytes_s=0.5 * gib, eta_s=18.0
    )
    assert plain_line(progress) == (
        "write shard 3/11  3.00 GiB/12.00 GiB (25%)  512.00 MiB/s  ETA 0:18"
    )
    progress.done = progress.total
    assert plain_line(progress).endswith("12.00 GiB/12.00 GiB (100%)  512.00 MiB/s")
    progress.done, progress.eta_s = 0, None
    assert plain_line(progress).endswith("(0%)  512.00 MiB/s")
    progress.bytes_s = 0.0  # nothing is known yet
    assert plain_line(progress) == "write shard 3/11  0 B/12.00 GiB (0%)"


def test_a_phase_measured_in_bytes_as_json() -> None:
    console = _Recorder()
    JsonLines(console).update(
        Progress("write", 10, 40, detail="shard 1/2", bytes_s=20.4, eta_s=1.5)
    )
    assert [json.loads(line) for line in console.lines] == [
        {
            "event": "progress",
            "phase": "write",
            "done": 10,
            "total": 40,
            "detail": "shard 1/2",
            "bytes_s": 20,
            "eta_s": 2,
        }
    ]


def test_styles() -> None:
    console = _Recorder()
    console.live = False
    assert isinstance(make_reporter("auto", console), PlainLines)
    assert isinstance(make_reporter("bar", console), PlainLines)
    assert isinstance(make_reporter("off", console), Silent)
    assert isinstance(make_reporter("auto", _Recorder(quiet=True)), Silent)
    assert isinstance(make_reporter("json", _Recorder(quiet=True)), JsonLines)
    console.live = True
    assert type(make_reporter("auto", console)).__name__ == "BarOnTerminal"


def test_rates_are_those_of_the_last_five_seconds() -> None:
    meter = RateMeter()
    assert meter.rates() == (0.0, 0.0)
    for second in range(20):
        rate = 100 if second < 10 else 10
        meter.add(second * rate + (900 if second >= 10 else 0), second * 1000, now=float(second))
    out, into = meter.rates()
    assert (round(out), round(into)) == (10, 1000)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (41, "0:41"), (727, "12:07"), (3723, "1:02:03")]
)
def test_clock(seconds: int, text: str) -> None:
    assert clock(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0.0"), (96.34, "96.3"), (6800, "6.8k"), (1.2e6, "1.2M")]
)
def test_short_count(number: float, text: str) -> None:
    assert short_count(number) == text


def _bar_lines(progress: Progress, width: int) -> list[str]:
    reporter, terminal = BarOnTerminal(_Recorder()), RichConsole(width=width, force_terminal=True)
    reporter._bar._live = mock.Mock()  # nothing is drawn
    reporter.update(progress)
    with terminal.capture() as capture:
        terminal.print(reporter._bar._lines)
    text = re.sub(r"\x1b\[[0-9;]*m", "", capture.get())
    return [line.rstrip() for line in text.splitlines()]


@pytest.mark.parametrize("order", ["input", "completion"])
def test_records_and_the_bar_share_a_terminal(
    program: Program, fake_model: Path, order: str
) -> None:
    """A record must not be written into the bar's line, nor be wiped away with it."""
    lines = [{"prompt": f"say {'x' * (i % 9)}record {i} ends here."} for i in range(30)]
    source = program.write_lines("in", lines)
    args = ["generate", str(fake_model), "-i", str(source), "--format", "text", "--order", order]
    env = program.environ(TERM="xterm", FAKE_STEP_SECONDS="0.03", FAKE_TOKENS="3")
    argv = [*program.command, *args, "--max-num-seqs", "4"]
    with Terminal(argv, env, program.home, columns=80) as terminal:
        assert terminal.wait_for_exit() == 0
        shown = terminal.lines
        _, _, later = terminal.raw.partition(b"record 9 ends")
        assert b"run 4" in later, "the bar did not come back"
    texts = [line["prompt"].removeprefix("say ") for line in lines]
    found = [line for line in shown if "record" in line]
    assert sorted(found) == sorted(texts)
    assert order == "completion" or found == texts
    assert not any("wait 0" in line or "━" in line for line in shown), "the bar is gone at the end"


def test_rows_into_which_a_narrower_terminal_breaks_the_bar_are_wiped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stderr", io.StringIO())
    bar = Bar(_Recorder())
    bar._live = mock.Mock()
    for width, rows in ((100, 0), (30, 3 + 3), (30, 0), (100, 0)):
        bar._rich.width = width
        bar.show("generate", 1, 2, "f" * 200, "p" * 100)
        sys.stderr.truncate(0)
        bar._render()
        assert sys.stderr.getvalue().count("\x1b[2K\x1b[1A") == rows, width


@pytest.mark.parametrize("width", [40, 60, 80, 150])
def test_the_bar_is_two_lines_that_fit(width: int) -> None:
    stats = _stats(
        num_running=64,
        num_waiting=124,
        kv_blocks_used=9120,
        kv_blocks_total=12_800,
        state_slots_used=64,
        state_slots_total=64,
        snapshots_used=18,
        snapshots_total=32,
        bound_by="state slots",
    )
    progress = Progress(
        "generate",
        812,
        1000,
        failed=3,
        out_tok_s=6800,
        in_tok_s=41_200,
        eta_s=41,
        mean_length=12,
        hit=0.38,
        prefill=(4096, 14490),
        stats=stats,
    )
    first, second = _bar_lines(progress, width)
    assert max(len(first), len(second)) <= width
    assert first.startswith("generate ") and "812/1,000 81%" in first
    assert second.startswith("run 64  wait 124 (state slots) │ ")
    if width == 150:
        assert first.endswith(
            " 812/1,000 81%  err 3 │ out 6.8k tok/s │ ETA 0:41 │ in 41.2k tok/s (hit 38%) │ len 12"
        )
        assert second.endswith(
            "prompt 4,096/14,490 (28%) │ KV 71% │ state 64/64 │ snap 18/32 │ preempt 0"
            " │ 9,120/12,800 blk"
        )


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_bar_of_a_conversion_fits(width: int) -> None:
    progress = Progress(
        "write", 44_239_163_392, 94_489_280_512, detail="shard 3/11", bytes_s=2e9, eta_s=25.0
    )
    (line,) = _bar_lines(progress, width)
    assert len(line) <= width
    if width >= 80:
        assert line.endswith("shard 3/11  41.20 GiB/88.00 GiB (46%) │ 1.86 GiB/s  ETA 0:25")


def test_k20_n_counts_sequences_and_each_phase_begins_with_a_line(
    program: Program, fake_model: Path
) -> None:
    lines = [{"prompt": "seeded", "n": 10} for _ in range(4)]
    source = program.write_lines("in", lines)
    done = program.run("generate", fake_model, "-i", source, "-o", "out")
    phases = [line.split()[0] for line in done.err_lines]
    assert phases.index("loading") < phases.index("weights") < phases.index("generate")
    assert "generate 0/40 outputs 0%" in done.err
    assert "generate 40/40 outputs 100%" in done.err


def test_progress_off_is_silent_about_progress(program: Program, fake_model: Path) -> None:
    source = program.write_lines("in", [{"prompt": "say a"}])
    done = program.run("generate", fake_model, "-i", source, "--progress", "off")
    assert "generate 0/1" not in done.err
    assert "weights" not in done.err


def test_d10_a_phase_that_takes_long_is_said_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_REPEAT_SECONDS", 0.01)
    shown: list[progress.Progress] = []

    class Recorder:
        def update(self, newest: progress.Progress) -> None:
            shown.append(newest)

        def close(self) -> None: ...

    interrupts = Interrupts(Console())
    with progress.loading_progress(Recorder(), interrupts) as show:
        time.sleep(0.05)
        assert shown == []
        show("compile", 1, 6)
        deadline = time.monotonic() + 10
        while len(shown) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        show("graphs", 2, 6)
    assert {(p.phase, p.done) for p in shown} == {("compile", 1), ("graphs", 2)}
    count = len(shown)
    assert count >= 4
    time.sleep(0.05)
    assert len(shown) == count, "said after the end"
