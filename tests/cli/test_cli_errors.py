"""Mistakes of users: one short message, the right exit code, nothing on stdout."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.program import REAL, Program

_Setup = Callable[[Program], list[str]]


def _touch(name: str, text: str = "{}\n") -> Callable[[Program], None]:
    return lambda program: (program.home / name).write_text(text) and None


def _empty_dir(program: Program) -> None:
    (program.home / "empty").mkdir()


def _pickle_only(program: Program) -> None:
    (program.home / "bins").mkdir()
    (program.home / "bins" / "config.json").write_text("{}")
    (program.home / "bins" / "pytorch_model.bin").write_bytes(b"x")


@pytest.mark.parametrize(
    ("setup", "args", "first_line"),
    [
        (None, ["generate"], "error: nothing to generate"),
        (
            None,
            ["generate", "-p", "x", "-i", "y"],
            "error: --prompt and --input exclude each other",
        ),
        (None, ["generate", "Org/Name", "-p", "x"], "error: model 'Org/Name' is not a directory"),
        (_empty_dir, ["generate", "empty", "-p", "x"], "error: model directory empty is empty"),
        (
            _pickle_only,
            ["generate", "bins", "-p", "x"],
            "error: model directory bins has no safetensors",
        ),
        (
            None,
            ["generate", "-i", "none.jsonl"],
            "error: cannot read input none.jsonl: No such file",
        ),
        (_empty_dir, ["generate", "-i", "empty"], "error: cannot read input empty: Is a directory"),
        (_touch("e", ""), ["generate", "-i", "e"], "error: e holds no prompts (empty_file)"),
        (_touch("b", "\n \n"), ["generate", "-i", "b"], "error: b holds no prompts (empty_file)"),
        (
            _touch("a"),
            ["generate", "-i", "a", "-o", "a"],
            "error: --output and --input are the same",
        ),
        (_touch("a"), ["generate", "-i", "a", "-o", "no/b"], "error: cannot write no/b: directory"),
        (
            _touch("a"),
            ["generate", "-i", "a", "-o", "."],
            "error: cannot write .: it is a directory",
        ),
        (
            _touch("a"),
            ["generate", "-i", "a", "--resume", "auto"],
            "error: --resume needs a regular",
        ),
        (None, ["generate", "-p", "x", "--overwrite"], "error: --overwrite needs a regular file"),
        (None, ["generate", "-p", ""], "error: the prompt is empty"),
        (None, ["generate", "-p", "x", "--think", "--no-think"], "error: --think and --no-think"),
        (
            None,
            ["generate", "-p", "x", "--force-param", "temprature=0"],
            "error: --force-param tem",
        ),
        (
            None,
            ["generate", "-p", "x", "--json", "--logprobs", "1000"],
            "error: --logprobs: logprobs: ",
        ),
        (None, ["generate", "-p", "x", "--temperature", "-1"], "error: --temperature -1: "),
        (None, ["generate", "-p", "x", "--temperature", "nan"], "error: --temperature nan: "),
        (None, ["generate", "-p", "x", "--dtype", "int4"], "error: --dtype int4: engine.dtype: "),
        (None, ["generate", "-p", "x", "--device", "cuda"], "error: no usable CUDA device"),
        (
            None,
            ["generate", "-p", "x", "--separator", ",", "--json"],
            "error: --separator goes with",
        ),
        (None, ["generate", "-p", "x", "--limit", "3"], "error: --limit goes with --input"),
        (None, ["generate", "-p", "x", "--config", "no.yaml"], "error: cannot read config no.yaml"),
    ],
)
def test_k36_errors_are_short_and_say_what_to_do(
    program: Program,
    setup: Callable[[Program], None] | None,
    args: list[str],
    first_line: str,
) -> None:
    if setup is not None:
        setup(program)
    done = program.run_here(*args)
    assert done.code == 2
    assert done.out == ""
    errors = [line for line in done.err_lines if not line.startswith(("model: demo", "loading"))]
    assert errors[0].startswith(first_line)
    assert len(errors) <= 6
    assert "Traceback" not in done.err
    assert not list(program.home.glob("state/minivllm/crash*"))


def test_k36_debug_shows_the_traceback(program: Program, fake_model: Path) -> None:
    done = program.run("generate", fake_model, "-i", "none", "--debug")
    assert done.code == 2
    assert "Traceback (most recent call last)" in done.err


def test_an_unexpected_error_leaves_a_crash_file_not_a_traceback(
    program: Program, fake_model: Path
) -> None:
    done = program.run("generate", fake_model, "-p", "x", FAKE_STEP_SECONDS="soon")
    assert done.code == 1
    assert done.err_lines[-3] == (
        "error: unexpected ValueError: could not convert string to float: 'soon'"
    )
    (crash,) = (program.home / "state" / "minivllm").glob("crash-*.json")
    assert str(crash) in done.err_lines[-2]
    assert "Traceback" not in done.err
    assert "could not convert" in crash.read_text()
    assert crash.stat().st_mode & 0o777 == 0o600


def test_k22_an_engine_that_dies_is_exit_1_and_keeps_what_is_done(
    program: Program, fake_model: Path
) -> None:
    lines = [{"prompt": "say one"}, {"prompt": "crash"}]
    source = program.write_lines("in.jsonl", lines)
    done = program.run(
        "generate", fake_model, "-i", source, "-o", "out.jsonl", "--max-num-seqs", "1"
    )
    assert (done.code, done.out) == (1, "")
    error = done.err.partition("error: ")[2].splitlines()
    assert error[0] == "engine failed: the fan fell off in step 2"
    assert error[1] == "why: RuntimeError; 1 of 2 done"
    assert error[2].startswith("details: ")
    assert len((program.home / "out.jsonl.partial").read_text().splitlines()) == 2
    assert not (program.home / "out.jsonl").exists()


def test_k14_what_does_not_fit_is_exit_4_with_what_does(program: Program, fake_model: Path) -> None:
    def run(count: int) -> tuple[int, str]:
        done = program.run(
            "generate", fake_model, "-p", "say x", "--max-num-seqs", str(count), FAKE_CAPACITY="64"
        )
        return done.code, done.err

    code, err = run(256)
    assert code == 4
    assert err.endswith(
        "error: max_num_seqs 256 needs 256 state slots (36.7 GiB); 64 fit\ntry: --max-num-seqs 64\n"
    )
    assert run(64)[0] == 0


def test_read_only_and_unwritable_outputs_are_found_before_loading(
    program: Program, fake_model: Path
) -> None:
    source = program.write_lines("in.jsonl", [{"prompt": "say x"}])
    (program.home / "ro.jsonl").write_text("kept")
    (program.home / "ro.jsonl").chmod(0o444)
    done = program.run("generate", fake_model, "-i", source, "-o", "ro.jsonl", "--overwrite")
    assert done.code == 2
    assert done.err == "error: cannot write ro.jsonl: it is read-only\ntry: --output new.jsonl\n"
    assert (program.home / "ro.jsonl").read_text() == "kept"
    assert program.engine_log == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_directory_is_found_before_loading(program: Program, fake_model: Path) -> None:
    source = program.write_lines("in.jsonl", [{"prompt": "say x"}])
    closed = program.home / "closed"
    closed.mkdir(mode=0o555)
    done = program.run("generate", fake_model, "-i", source, "-o", "closed/out.jsonl")
    assert done.code == 2
    assert done.err_lines[0].startswith("error: cannot write ")
    assert done.err_lines[1].startswith("try: --output FILE")
    assert program.engine_log == []


@pytest.mark.parametrize("link", ["symlink", "hard link"])
def test_output_may_not_be_the_input_under_another_name(
    program: Program, fake_model: Path, link: str
) -> None:
    source = program.write_lines("in.jsonl", [{"prompt": "say x"}])
    other = program.home / "other.jsonl"
    if link == "symlink":
        other.symlink_to(source)
    else:
        other.hardlink_to(source)
    done = program.run("generate", fake_model, "-i", source, "-o", other, "--overwrite")
    assert done.code == 2
    assert done.err_lines == [
        "error: --output and --input are the same file",
        "try: --output new.jsonl",
    ]
    assert source.read_text() == '{"prompt": "say x"}\n'


@pytest.mark.parametrize("command", [["generate", "demo", "-p", "x"], ["chat", "demo"]])
@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["--device", "cuda"], 2),
        (["--max-model-len", "1000000"], 2),
        (["--max-num-seqs", "100000"], 4),
        (["--set", f"sampling.top_k={'9' * 5000}"], 2),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_can_be_known_without_torch_is_refused_without_it(
    program: Program, command: list[str], args: list[str], code: int
) -> None:
    program.command = REAL
    (program.home / "torch.py").write_text("raise SystemExit('torch was imported')\n")
    done = program.run(*command, *args, stdin=b"hi", PYTHONPATH=str(program.home))
    assert (done.code, done.out) == (code, "")
    assert "torch was imported" not in done.err
    assert sum(line.startswith("error: ") for line in done.err_lines) == 1


@pytest.mark.parametrize(
    ("command", "args"),
    [("chat", []), ("bench", []), ("generate", ["-p", "x"]), ("generate", ["-i", "in.txt"])],
)
def test_k36_the_hint_for_a_wrong_model_names_the_command_that_was_run(
    program: Program, command: str, args: list[str]
) -> None:
    (program.home / "in.txt").write_text("x\n")
    done = program.run_here(command, "./nosuch", *args, stdin=b"hello")
    assert done.code == 2
    assert "error: model './nosuch' is not a directory" in done.err
    assert f"try: minivllm {command} ./DIR, or MODEL = demo" in done.err
