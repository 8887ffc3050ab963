"""Help, version and usage errors: plain, and without torch."""

import subprocess
import sys

import pytest

from cli.program import REAL, Program

_PROBE = (
    "import sys; sys.argv = ['minivllm', *sys.argv[1:]]\n"
    "from minivllm_cli.app import run\n"
    "code = run(sys.argv[1:])\n"
    "heavy = {'torch', 'transformers', 'prompt_toolkit', 'rich.markdown', 'tokenizers'}\n"
    "print(sorted(heavy & set(sys.modules)), code, file=sys.stderr)\n"
)


@pytest.fixture
def real(program: Program) -> Program:
    program.command = REAL
    return program


@pytest.mark.parametrize(
    "args",
    [
        ["--help"],
        ["generate", "--help"],
        ["chat", "--help"],
        ["bench", "--help"],
        ["convert-weights", "--help"],
        ["env", "--help"],
        ["--version"],
    ],
    ids=" ".join,
)
def test_k21_help_loads_nothing_heavy(real: Program, args: list[str]) -> None:
    probe = subprocess.run(
        [sys.executable, "-c", _PROBE, *args], capture_output=True, text=True, env=real.environ()
    )
    assert probe.stderr == "[] 0\n"


def test_k21_a_config_error_loads_nothing_heavy(real: Program) -> None:
    (real.home / "bad.yaml").write_text("engine: {max_num_sqs: 1}\n")
    probe = subprocess.run(
        [sys.executable, "-c", _PROBE, "generate", "--prompt", "x", "--config", "bad.yaml"],
        capture_output=True,
        text=True,
        env=real.environ(),
        cwd=real.home,
    )
    assert probe.stderr.endswith("[] 2\n")


def test_version_is_the_packages(real: Program) -> None:
    from minivllm_engine import __version__

    assert real.run("--version").out == f"minivllm {__version__}\n"
    assert real.run("generate", "--version").out == f"minivllm {__version__}\n"


def test_each_flag_that_sets_a_key_shows_its_path(real: Program) -> None:
    text = " ".join(real.run_here("generate", "--help", COLUMNS="200").out.split())
    for flag, path in (
        ("--max-num-seqs", "[engine.max_num_seqs]"),
        ("--temperature", "[sampling.temperature]"),
    ):
        assert path in text.partition(flag)[2].partition(" --")[0]


def test_what_every_command_takes_is_shown_once(real: Program) -> None:
    whole, own = real.run_here("--help").out, real.run_here("generate", "--help").out
    for text in ("--progress <auto|bar|plain|json|off>", "-v, --verbose", "Print the version"):
        assert text in whole
        assert text not in own
    assert "--progress" in own.partition("Options of every command")[2]


@pytest.mark.parametrize(("columns", "width"), [("80", 78), ("100", 98), ("200", 98)])
def test_help_is_as_wide_as_the_terminal_up_to_100(real: Program, columns: str, width: int) -> None:
    lines = real.run_here("generate", "--help", COLUMNS=columns).out.splitlines()
    assert width - 12 < max(map(len, lines)) <= width


def test_help_has_no_escapes_even_where_colour_is_forced(real: Program) -> None:
    done = real.run("generate", "--help", FORCE_COLOR="1", GITHUB_ACTIONS="true")
    assert b"\x1b" not in done.stdout
    assert max(map(len, done.out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["generate", "--inptu", "x"], "no such option: --inptu (Possible options: --input)"),
        (["generate", "--graph"], "no such option: --graph\n"),
        (["genrate"], "no such command 'genrate'\ntry: minivllm generate --help\n"),
        (["gen"], "no such command 'gen'\ntry: minivllm generate --help\n"),
        (["xyzzy"], "no such command 'xyzzy'\ntry: minivllm --help\n"),
        (["generate", "--on-error", "x"], "--on-error: 'x' is not one of 'skip', 'stop'"),
        (["generate", "--limit", "x"], "--limit: not a whole number\n"),
    ],
)
def test_usage_errors_name_what_was_probably_meant(
    real: Program, args: list[str], message: str
) -> None:
    done = real.run_here(*args)
    assert done.code == 2
    assert done.out == ""
    assert done.err.startswith(f"error: {message}")
    assert done.err_lines[1].startswith("try: minivllm")


@pytest.mark.parametrize("command", ["generate", "inspect-cache", "bench"])
def test_an_option_without_its_value_points_to_the_help_of_its_command(
    real: Program, command: str
) -> None:
    done = real.run_here(command, "--config")
    assert done.code == 2
    assert done.err_lines == [
        "error: option '--config' requires an argument",
        f"try: minivllm {command} --help",
    ]


def test_no_command_shows_help_on_stderr(real: Program) -> None:
    done = real.run()
    assert (done.code, done.out) == (2, "")
    assert "Commands:" in done.err
