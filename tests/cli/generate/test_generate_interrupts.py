"""Ctrl-C and SIGTERM at every stage: what is done is kept, the code says what happened, nobody waits long."""

import json
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from cli.program import Program, is_idle, read_records, wait_for

SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143)]


@pytest.fixture
def source(program: Program) -> Path:
    return program.write_lines(
        "in.jsonl", [{"id": n, "prompt": f"count {n}"} for n in range(1, 41)]
    )


def _args(model: Path, source: Path, *more: Any) -> list[Any]:
    return ["generate", model, "-i", source, "-o", "out.jsonl", "--max-num-seqs", "2", *more]


def _journal_lines(program: Program) -> int:
    partial = program.home / "out.jsonl.partial"
    return partial.read_bytes().count(b"\n") if partial.exists() else 0


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_h17_while_reading_stdin(
    program: Program, fake_model: Path, number: signal.Signals, code: int
) -> None:
    process = subprocess.Popen(
        [*program.command, "generate", str(fake_model), "-i", "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=program.home,
        env=program.environ(),
    )
    assert process.stdin is not None
    process.stdin.write(b'{"prompt": "say a"}\n')
    process.stdin.flush()
    wait_for(lambda: is_idle(process.pid, signal.SIGTERM))
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (code, b"")
    assert b"stopping while reading the input. Ctrl-C again to leave at once.\n" in err


@pytest.mark.parametrize(("number", "code"), SIGNALS[:1])
def test_h17_while_loading(
    program: Program, fake_model: Path, source: Path, number: signal.Signals, code: int
) -> None:
    process = program.start(*_args(fake_model, source), FAKE_LOAD_SECONDS="30")
    program.interrupt_when(lambda: program.stderr_has("weights 0/11"), process, number)
    done = program.finish(process)
    assert (done.code, done.out) == (code, "")
    assert "stopping while loading the model. Ctrl-C again to leave at once." in done.err_lines
    assert "Traceback" not in done.err
    assert not list(program.home.glob("out*"))


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_h17_while_generating_running_requests_finish(
    program: Program, fake_model: Path, source: Path, number: signal.Signals, code: int
) -> None:
    args = _args(fake_model, source)
    process = program.start(*args, FAKE_STEP_SECONDS="0.05", FAKE_TOKENS="4")
    program.interrupt_when(lambda: _journal_lines(program) > 5, process, number)
    done = program.finish(process)
    assert (done.code, done.out) == (code, "")
    saved = _journal_lines(program) - 1
    # One of the two may have finished in the step before.
    assert re.search(
        r"^stopping: no new requests; finishing [0-2] running \(up to 10 s\)\. "
        r"Ctrl-C again to abort now\.$",
        done.err,
        re.MULTILINE,
    )
    assert done.err_lines[-1] == f"{saved}/40 saved. Re-run the same command to continue."
    assert 5 <= saved < 40
    assert program.engine_log[-1] == {"closed": True}
    journal = (program.home / "out.jsonl.partial").read_text().splitlines()[1:]
    assert all(json.loads(line)["record"]["status"] == "ok" for line in journal)
    program.forget_engine()
    again = program.run(*args)
    assert again.code == 0
    assert len(program.added) == 40 - saved
    texts = [r["outputs"][0]["text"] for r in read_records(program.home / "out.jsonl")]
    assert texts == [" ".join(map(str, range(1, n + 1))) for n in range(1, 41)]


@pytest.mark.parametrize(("number", "code"), SIGNALS[:1])
def test_h17_while_the_first_prompts_are_read_none_of_them_is_started(
    program: Program, fake_model: Path, source: Path, number: signal.Signals, code: int
) -> None:
    process = program.start(*_args(fake_model, source), FAKE_ADD_SECONDS="0.5")
    program.interrupt_when(lambda: len(program.engine_log) > 0, process, number)
    done = program.finish(process)
    assert (done.code, done.out) == (code, "")
    assert "no new requests; finishing 0 running" in done.err
    assert done.err_lines[-1] == "0/40 saved. Re-run the same command to continue."
    # No second prompt was read, and the one that was is gone.
    assert len(program.added) == 1 and program.engine_log[-1] == {"closed": True}


def test_h17_what_the_step_at_hand_lets_in_after_the_signal_is_dropped(
    program: Program, fake_model: Path, source: Path
) -> None:
    # All answers would be complete in that one step.
    process = program.start(*_args(fake_model, source), FAKE_ADMIT_SECONDS="0.5", FAKE_TOKENS="500")
    program.interrupt_when(lambda: {"step": 0} in program.engine_log, process, signal.SIGINT)
    done = program.finish(process)
    assert (done.code, done.out) == (130, "")
    assert "no new requests; finishing 0 running" in done.err
    assert done.err_lines[-1] == "0/40 saved. Re-run the same command to continue."


def test_h17_requests_in_their_first_step_are_counted_and_finished(
    program: Program, fake_model: Path
) -> None:
    lines = [{"prompt": "count 2", "n": 2}, {"prompt": "say a"}, {"prompt": "say b"}]
    source = program.write_lines("in.jsonl", lines)
    args = ["generate", fake_model, "-i", source, "-o", "out.jsonl", "--max-num-seqs", "3"]
    process = program.start(*args, FAKE_STEP_SECONDS="0.5", FAKE_TOKENS="500")
    wait_for(lambda: program.stderr_has("generate 0/4"))
    time.sleep(0.25)
    process.send_signal(signal.SIGINT)
    done = program.finish(process)
    assert "no new requests; finishing 2 running" in done.err
    assert done.err_lines[-1] == "2/3 requests saved. Re-run the same command to continue."


def test_h17_a_request_that_does_not_end_is_aborted_after_a_while(
    program: Program, fake_model: Path
) -> None:
    source = program.write_lines("in.jsonl", [{"prompt": "say a"}, {"prompt": "forever"}])
    process = program.start(
        *_args(fake_model, source, "--set", "sampling.max_tokens=4000"),
        FAKE_STEP_SECONDS="0.05",
        FAKE_TOKENS="1",
        FAKE_CLEAN_UP_SECONDS="0.5",
    )
    program.interrupt_when(lambda: _journal_lines(program) > 1, process, signal.SIGINT)
    done = program.finish(process)
    assert done.code == 130
    assert done.err_lines[-1] == "1/2 saved. Re-run the same command to continue."
    assert _journal_lines(program) == 2, "an aborted request is no result"


@pytest.mark.parametrize(("number", "code"), SIGNALS[:1])
def test_h17_a_second_signal_aborts_now(
    program: Program, fake_model: Path, number: signal.Signals, code: int
) -> None:
    source = program.write_lines("in.jsonl", [{"prompt": "say a"}, {"prompt": "forever"}])
    process = program.start(*_args(fake_model, source), FAKE_STEP_SECONDS="0.05", FAKE_TOKENS="1")
    program.interrupt_when(lambda: _journal_lines(program) > 1, process, number)
    program.interrupt_when(lambda: program.stderr_has("Ctrl-C again"), process, number)
    done = program.finish(process)
    assert done.code == code
    assert done.err_lines[-1] == "1/2 saved. Re-run the same command to continue."
    assert _journal_lines(program) == 2


def test_h17_a_step_that_never_returns_is_left_behind(program: Program, fake_model: Path) -> None:
    source = program.write_lines("in.jsonl", [{"prompt": "say a"}])
    process = program.start(
        *_args(fake_model, source),
        FAKE_STEP_SECONDS="600",
        FAKE_STUCK="1",
        FAKE_CLEAN_UP_SECONDS="0.5",
    )
    wait_for(lambda: program.stderr_has("generate 0/1"))
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
    assert program.finish(process).code == 130


def test_without_a_journal_what_is_finished_is_written(program: Program, fake_model: Path) -> None:
    lines = [{"prompt": "forever"}, {"prompt": "say b"}, {"prompt": "say c"}]
    source = program.write_lines("in.jsonl", lines)
    process = program.start(
        *("generate", fake_model, "-i", source, "--max-num-seqs", "2"),
        FAKE_STEP_SECONDS="0.02",
        FAKE_TOKENS="1",
    )
    wait_for(lambda: len([e for e in program.engine_log if "add" in e]) == 3)
    time.sleep(0.5)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
    done = program.finish(process)
    assert done.code == 130
    assert [r["outputs"][0]["text"] for r in done.records] == ["b", "c"]
    assert done.err_lines[-1] == "2/3 written; a new run starts again"


@pytest.mark.parametrize(("number", "code"), SIGNALS[:1])
def test_h17_while_publishing(
    program: Program, fake_model: Path, source: Path, number: signal.Signals, code: int
) -> None:
    args = _args(fake_model, source)
    process = program.start(*args, FAKE_PUBLISH_SECONDS="30")
    program.interrupt_when(
        lambda: (program.home / "out.jsonl.publishing").exists(), process, number
    )
    done = program.finish(process)
    assert done.code == code
    assert "stopping while publishing the output." in done.err
    assert done.err_lines[-1] == "40/40 saved. Re-run the same command to continue."
    assert sorted(p.name for p in program.home.glob("out*")) == ["out.jsonl.partial"]
    program.forget_engine()
    assert program.run(*args).code == 0
    assert program.engine_log == []
    assert len(read_records(program.home / "out.jsonl")) == 40


def test_an_interrupt_with_nothing_finished_says_so(program: Program, fake_model: Path) -> None:
    source = program.write_lines("in.jsonl", [{"prompt": "forever"}])
    process = program.start(
        *_args(fake_model, source),
        **{"FAKE_ADMIT_SECONDS": "0.01", "FAKE_STEP_SECONDS": "0.05", "FAKE_TOKENS": "1"},
    )
    program.interrupt_when(lambda: {"step": 1} in program.engine_log, process, signal.SIGINT)
    program.interrupt_when(lambda: program.stderr_has("Ctrl-C again"), process, signal.SIGINT)
    done = program.finish(process)
    assert done.code == 130
    assert done.err_lines[-1].startswith("0/1 saved.")


def test_the_summary_of_an_interrupted_run_says_that_it_is_not_complete(
    program: Program, fake_model: Path, source: Path
) -> None:
    args = _args(fake_model, source, "--summary", "sum.json")
    process = program.start(*args, FAKE_STEP_SECONDS="0.05", FAKE_TOKENS="4")
    program.interrupt_when(lambda: _journal_lines(program) > 5, process, signal.SIGINT)
    done = program.finish(process)
    saved = _journal_lines(program) - 1
    assert done.code == 130 and done.err_lines[-1].startswith(f"{saved}/40 saved.")
    summary = json.loads((program.home / "sum.json").read_text())
    assert summary["complete"] is False
    assert summary["requests"]["ok"] == saved and summary["seconds"]["generate"] > 0
    assert program.run(*args).code == 0
    summary = json.loads((program.home / "sum.json").read_text())
    assert summary["complete"] is True
    assert (summary["requests"]["ok"], summary["requests"]["resumed"]) == (40, saved)


def test_a_summary_that_cannot_be_left_is_a_warning_and_no_other_exit_code(
    program: Program, fake_model: Path, source: Path
) -> None:
    (program.home / "side").mkdir()
    args = _args(fake_model, source, "--summary", "side/sum.json")
    process = program.start(*args, FAKE_STEP_SECONDS="0.05", FAKE_TOKENS="4")
    wait_for(lambda: _journal_lines(program) > 2)
    (program.home / "side").rmdir()
    process.send_signal(signal.SIGINT)
    done = program.finish(process)
    assert done.code == 130
    assert any(line.startswith("warning: cannot write side/sum.json") for line in done.err_lines)
    assert "saved. Re-run the same command" in done.err_lines[-1]


def test_one_prompt_that_is_interrupted_leaves_a_summary_too(
    program: Program, fake_model: Path
) -> None:
    process = program.start(
        *("generate", fake_model, "-p", "forever", "--summary", "sum.json"),
        FAKE_STEP_SECONDS="0.05",
        FAKE_TOKENS="1",
    )
    wait_for(lambda: any("add" in entry for entry in program.engine_log))
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    assert program.finish(process).code == 130
    summary = json.loads((program.home / "sum.json").read_text())
    assert (summary["complete"], summary["requests"]["ok"]) == (False, 0)
    assert summary["seconds"]["generate"] > 0


def test_where_requests_have_several_outputs_both_counts_name_their_unit(
    program: Program, fake_model: Path
) -> None:
    lines = [{"prompt": f"count {40 + n}", "n": 3} for n in range(12)]
    source = program.write_lines("in.jsonl", lines)
    args = _args(fake_model, source, "--set", "output.progress=json")
    process = program.start(*args, FAKE_STEP_SECONDS="0.05", FAKE_TOKENS="8")
    program.interrupt_when(lambda: _journal_lines(program) > 3, process, signal.SIGINT)
    done = program.finish(process)
    saved = _journal_lines(program) - 1
    events = [json.loads(line) for line in done.err_lines]
    last = f"{saved}/12 requests saved. Re-run the same command to continue."
    assert events[-1]["message"] == last
    shown = [e for e in events if e["event"] == "progress" and e["phase"] == "generate"]
    assert {(e["total"], e["unit"]) for e in shown} == {(36, "outputs")}
    again = program.run(*_args(fake_model, source, "--set", "output.progress=plain"))
    assert f"resuming: {saved}/12 requests done" in again.err_lines
    assert any(line.startswith("generate 36/36 outputs 100%") for line in again.err_lines)
