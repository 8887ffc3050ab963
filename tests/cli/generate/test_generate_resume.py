"""The journal: nothing finished is lost, nothing is answered twice, nothing is mixed up."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from cli.in_process import InProcess
from cli.program import Finished, Program, read_records
from minivllm_cli.errors import CliError
from minivllm_cli.files.journal import Journal

_LINES = [{"id": f"r{n}", "prompt": "seeded"} for n in range(10)]
# One sequence at a time, one token a step: a record about every half second.
_SLOW = {"FAKE_STEP_SECONDS": "0.02", "FAKE_TOKENS": "1"}


@pytest.fixture
def source(program: Program) -> Path:
    return program.write_lines("in.jsonl", _LINES)


def _args(model: Path, source: Path, *more: str) -> list[Any]:
    return ["generate", model, "-i", source, "-o", "out.jsonl", "--max-num-seqs", "1", *more]


def _journal(program: Program) -> list[dict[str, Any]]:
    path = program.home / "out.jsonl.partial"
    return [json.loads(line) for line in path.read_text().splitlines()]


def _break_after(program: Program, count: int, args: list[Any]) -> int:
    """Run until the engine fails when `count` records are journaled, at two steps a record."""
    assert program.run(*args, FAKE_FAILS_AT=str(2 * count + 1)).code == 1
    assert len(_journal(program)) == count + 1
    return count


def _outputs(path: Path) -> list[Any]:
    return [(r["id"], r["index"], r["outputs"], r["sampling"]) for r in read_records(path)]


def test_h15_k2_a_killed_run_is_continued(program: Program, fake_model: Path, source: Path) -> None:
    whole = Program(program.home / "whole")
    whole.home.mkdir()
    assert whole.run(*_args(fake_model, source)).code == 0
    args = _args(fake_model, source)
    partial = program.home / "out.jsonl.partial"
    process = program.start(*args, **_SLOW)
    program.interrupt_when(
        lambda: partial.exists() and partial.read_bytes().count(b"\n") > 5, process, signal.SIGKILL
    )
    process.wait()
    saved = partial.read_bytes().count(b"\n") - 1
    assert 5 <= saved < 10
    assert len(_journal(program)) == saved + 1
    with open(program.home / "out.jsonl.partial", "ab") as file:
        file.write(b'{"key": "torn, ')
    program.forget_engine()
    done = program.run(*args)
    assert done.code == 0
    assert f"resuming: {saved}/10 done" in done.err_lines
    assert len(program.added) == 10 - saved
    assert _outputs(program.home / "out.jsonl") == _outputs(whole.home / "out.jsonl")
    assert not (program.home / "out.jsonl.partial").exists()
    summary = done.err.partition("requests")[2].splitlines()[0]
    assert f"{saved} from an earlier run" in summary


def test_concurrency_may_change_between_runs(
    program: Program, fake_model: Path, source: Path
) -> None:
    saved = _break_after(program, 3, _args(fake_model, source))
    done = program.run("generate", fake_model, "-i", source, "-o", "out.jsonl")
    assert done.code == 0
    assert f"resuming: {saved}/10 done" in done.err_lines
    assert [r["sampling"]["seed"] for r in read_records(program.home / "out.jsonl")] == [*range(10)]


def test_the_header_names_what_the_journal_belongs_to(
    program: Program, fake_model: Path, source: Path
) -> None:
    _break_after(program, 1, _args(fake_model, source))
    header, first = _journal(program)[:2]
    assert header["journal"] == 1
    assert header["fingerprint"].startswith("sha256:")
    assert header["parts"]["seed_rule"] == "seed+index"
    assert set(header["parts"]) >= {"model", "tokenizer", "chat_template", "engine"}
    assert first["record"]["id"] == "r0"
    assert len(first["key"]) == 32


@pytest.mark.parametrize(
    ("file", "text", "part"),
    [
        ("chat_template.jinja", "{{ messages }}", "chat template"),
        ("config.json", "{}", "model"),
        ("tokenizer_config.json", '{"eos_token": "<|endoftext|>"}', "tokenizer"),
    ],
)
def test_another_model_is_refused_by_name(
    program: Program, fake_model: Path, source: Path, file: str, text: str, part: str
) -> None:
    model = program.home / "model"
    model.mkdir()
    for original in fake_model.iterdir():
        (model / original.name).write_bytes(original.read_bytes())
    args = _args(model, source)
    saved = _break_after(program, 2, args)
    before = (program.home / "out.jsonl.partial").read_bytes()
    (model / file).write_text(text)
    done = program.run(*args)
    assert (done.code, done.out) == (2, "")
    assert done.err.endswith(
        f"out.jsonl.partial belongs to another run: {part} changed\n"
        "try: --overwrite, or --resume force\n"
    )
    assert (program.home / "out.jsonl.partial").read_bytes() == before
    program.forget_engine()
    assert program.run(*args, "--resume", "force").code == 0
    assert len(program.added) == 10 - saved


def test_overwrite_starts_again(program: Program, fake_model: Path, source: Path) -> None:
    args = _args(fake_model, source)
    _break_after(program, 2, args)
    program.forget_engine()
    done = program.run(*args, "--overwrite")
    assert done.code == 0
    assert "resuming" not in done.err
    assert len(program.added) == 10


def test_changed_lines_are_answered_again_only_when_asked_to(
    program: Program, fake_model: Path, source: Path
) -> None:
    saved = _break_after(program, 4, _args(fake_model, source))
    before = (program.home / "out.jsonl.partial").read_bytes()
    lines = [dict(line) for line in _LINES]
    lines[1]["prompt"] = "say other"
    program.write_lines("in.jsonl", lines)
    program.forget_engine()
    done = program.run(*_args(fake_model, source))
    assert done.code == 2
    assert f"holds {saved} finished answers; this run would lose 1 of them" in done.err
    assert "--resume force" in done.err_lines[-1]
    assert (program.home / "out.jsonl.partial").read_bytes() == before
    done = program.run(*_args(fake_model, source, "--resume", "force"))
    assert f"resuming: {saved - 1}/10 done" in done.err_lines
    assert "warning: 1 answered lines changed and are run again" in done.err_lines
    assert program.added[0]["script"] == "say other"
    assert len(program.added) == 10 - saved + 1
    texts = [r["outputs"][0]["text"] for r in read_records(program.home / "out.jsonl")]
    assert texts[:3] == ["seed 0 output 0", "other", "seed 2 output 0"]


@pytest.mark.parametrize(
    "more",
    [
        ["--limit", "2"],
        ["--select", "r1"],
        ["--only-failed", "earlier.jsonl"],
        ["--temperature", "0.123"],
        ["--seed", "5"],
        ["--limit", "2", "--resume", "force"],
        ["--limit", "2", "--order", "completion", "--format", "text"],
    ],
    ids=" ".join,
)
def test_a_run_over_less_does_not_throw_answers_away(
    program: Program, fake_model: Path, source: Path, more: list[str]
) -> None:
    program.write_lines("earlier.jsonl", [{"id": "r0", "status": "error", "outputs": []}])
    saved = _break_after(program, 4, _args(fake_model, source))
    before = (program.home / "out.jsonl.partial").read_bytes()
    program.forget_engine()
    done = program.run(*_args(fake_model, source, *more))
    assert (done.code, done.out, program.engine_log) == (2, "", [])
    assert f"out.jsonl.partial holds {saved} finished answers; this run would lose" in done.err
    assert done.err_lines[-1].startswith("try: the same command as before, ")
    assert "--overwrite" in done.err_lines[-1]
    assert (program.home / "out.jsonl.partial").read_bytes() == before
    assert not (program.home / "out.jsonl").exists()
    assert program.run(*_args(fake_model, source)).code == 0
    assert len(program.added) == 10 - saved


def test_a_run_over_more_goes_on(program: Program, fake_model: Path, source: Path) -> None:
    saved = _break_after(program, 2, _args(fake_model, source, "--limit", "8"))
    done = program.run(*_args(fake_model, source, "--order", "completion", "--format", "text"))
    assert done.code == 0
    assert f"resuming: {saved}/10 done" in done.err_lines


def test_failed_records_are_tried_again(program: Program, fake_model: Path) -> None:
    lines = [
        {"prompt": "say a"},
        {"prompt": "nan"},
        "null",
        {"prompt": "crash"},
        {"prompt": "say b"},
    ]
    source = program.write_lines("in.jsonl", lines)
    args = _args(fake_model, source)
    assert program.run(*args).code == 1
    program.write_lines("in.jsonl", [*lines[:1], {"prompt": "say mended"}, *lines[2:3], *lines[4:]])
    program.forget_engine()
    done = program.run(*args)
    assert "resuming: 1/4 done, 2 failed will be retried" in done.err_lines
    assert [entry["script"] for entry in program.added] == ["say mended", "say b"]
    records = read_records(program.home / "out.jsonl")
    assert [r["status"] for r in records] == ["ok", "ok", "error", "ok"]
    assert done.code == 3


def test_a_complete_journal_is_published_without_the_model(
    program: Program, fake_model: Path, source: Path
) -> None:
    args = _args(fake_model, source)
    assert program.run(*args).code == 0
    published = (program.home / "out.jsonl").read_bytes()
    records = read_records(program.home / "out.jsonl")
    _rebuild_journal(program, fake_model, source, records)
    (program.home / "out.jsonl").unlink()
    program.forget_engine()
    done = program.run(*args)
    assert done.code == 0
    assert program.engine_log == []
    assert (program.home / "out.jsonl").read_bytes() == published


def _rebuild_journal(
    program: Program, model: Path, source: Path, records: list[dict[str, Any]]
) -> None:
    """A journal that holds `records`, as a run leaves it that is killed before it publishes."""
    _break_after(program, 1, [*_args(model, source), "--overwrite"])
    partial = program.home / "out.jsonl.partial"
    header, *entries = partial.read_text().splitlines()
    keys = _keys(model, source)
    lines = [
        json.dumps({"key": keys[r["index"]], "index": r["index"], "record": r}) for r in records
    ]
    assert json.loads(entries[0])["key"] == keys[0]
    partial.write_text("\n".join([header, *lines]) + "\n")


def _keys(model: Path, source: Path) -> list[str]:
    from minivllm_cli import engine
    from minivllm_cli.batch.flags import GenerateFlags
    from minivllm_cli.batch.jobs import JobSource, Selection
    from minivllm_cli.batch.prompts import Overrides
    from minivllm_cli.config.settings import resolve_settings
    from minivllm_cli.console.streams import Console
    from minivllm_cli.files.input_file import InputFile

    settings = engine.add_model_sampling(resolve_settings(environ={}), model)
    file = InputFile.open(str(source), Console())
    jobs = JobSource(file, GenerateFlags(), settings, Overrides(None, {}, {}), Selection())
    keys = [job.key for job in jobs.jobs()]
    file.close()
    return keys


def test_a_second_run_on_the_same_output_is_refused(
    program: Program, fake_model: Path, source: Path
) -> None:
    args = _args(fake_model, source)
    _break_after(program, 2, args)
    partial = program.home / "out.jsonl.partial"
    held = Journal.open(partial, _journal(program)[0]["parts"])
    before = partial.read_bytes()
    for more in ([], ["--overwrite"]):
        done = program.run(*args, *more)
        assert done.code == 2
        assert "out.jsonl.partial is being written by another run" in done.err
    held.close()
    assert partial.read_bytes() == before
    assert program.run(*args).code == 0


@pytest.mark.parametrize("more", [[], ["--overwrite"], ["--resume", "force"]], ids=" ".join)
@pytest.mark.parametrize("notes", ["my notes\n", "my notes", '{"journal": 7}\n', "[]\n"])
def test_a_file_that_is_no_journal_is_left_alone(
    program: Program, fake_model: Path, source: Path, notes: str, more: list[str]
) -> None:
    partial = program.home / "out.jsonl.partial"
    partial.write_text(notes)
    done = program.run(*_args(fake_model, source, *more))
    assert done.code == 2
    assert "out.jsonl.partial is not a journal of minivllm" in done.err
    assert done.err_lines[-1].startswith("try: mv ")
    assert partial.read_text() == notes


@pytest.mark.parametrize("name", ["out.jsonl.partial", "out.jsonl.publishing"])
def test_a_link_where_a_file_of_ours_belongs_is_not_followed(
    program: Program, fake_model: Path, source: Path, name: str
) -> None:
    (program.home / "notes").write_text("precious")
    (program.home / name).symlink_to("notes")
    done = program.run(*_args(fake_model, source, "--overwrite"))
    assert done.code == 2
    assert name in done.err
    assert (program.home / "notes").read_text() == "precious"
    assert (program.home / name).is_symlink()


def test_a_foreign_file_where_the_output_is_published_from_is_left_alone(
    program: Program, fake_model: Path, source: Path
) -> None:
    (program.home / "out.jsonl.publishing").write_text("precious")
    assert program.run(*_args(fake_model, source)).code == 2
    assert (program.home / "out.jsonl.publishing").read_text() == "precious"


def test_a_directory_that_cannot_be_written_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.open", refuse)
    with pytest.raises(CliError) as caught:
        Journal.open(tmp_path / "out.partial", {})
    assert caught.value.exit_code == 2
    assert caught.value.problems[0].what.endswith("out.partial: Permission denied")
    assert caught.value.problems[0].hint


@pytest.mark.parametrize("torn", ["", '{"jour', '{"journal":1,"fingerprint":"sha'])
def test_a_torn_header_is_a_run_that_did_nothing(
    program: Program, fake_model: Path, source: Path, torn: str
) -> None:
    (program.home / "out.jsonl.partial").write_text(torn)
    assert program.run(*_args(fake_model, source)).code == 0
    assert len(read_records(program.home / "out.jsonl")) == 10


def test_a_run_that_fails_before_its_first_record_leaves_no_journal(
    program: Program, fake_model: Path, source: Path
) -> None:
    done = program.run(*_args(fake_model, source), FAKE_CAPACITY="0")
    assert done.code == 4
    assert sorted(p.name for p in program.home.iterdir()) == ["in.jsonl"]


def test_h15_memory_does_not_grow_with_the_file(program: InProcess, fake_model: Path) -> None:
    def peak(count: int) -> tuple[Finished, int]:
        source = program.home / f"{count}.jsonl"
        with open(source, "w") as file:
            for n in range(count):
                file.write(json.dumps({"id": n, "prompt": "say a", "note": "x" * 1500}) + "\n")
        args = ["generate", fake_model, "-i", source, "-o", f"{count}.out", "--order", "input"]
        environ = {"MEASURE_PEAK": str(program.home / "peak"), "FAKE_LOG": ""}
        done = program.run_process(*args, timeout=300, **environ)
        return done, int((program.home / "peak").read_text())

    few, small = peak(500)
    many, large = peak(10_000)
    assert (few.code, many.code) == (0, 0)
    with open(program.home / "10000.out") as file:
        assert [json.loads(line)["index"] for line in file] == list(range(10_000))
    # 15 MB of input and more of output; what grows is a few dozen bytes a line.
    assert (large - small) * 1024 < 9_500 * 300
