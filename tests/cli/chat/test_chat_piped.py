"""`chat` without a REPL: pipes, wrong streams, signals, start-up."""

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys

import pytest

from cli.chat.program import Chat
from minivllm_cli.chat.command import ChatFlags
from minivllm_engine.text.tokenizer import Tokenizer


def test_one_answer_on_stdout_and_the_figures_on_stderr(chat):
    run = chat.run(stdin=b"echo hello\n")
    assert (run.code, run.stdout) == (0, b"hello\n")
    assert re.fullmatch(r"6 tok · .* · stop\n", run.stderr.decode())
    assert b"\x1b" not in run.stderr


def test_quiet_and_no_stats_leave_stderr_empty(chat):
    for flag in ("-q", "--no-stats"):
        run = chat.pipe(flag, stdin=b"echo hello\n")
        assert (run.code, run.stdout, run.stderr) == (0, b"hello\n", b"")


def test_all_of_stdin_is_one_message_and_never_a_command(chat):
    chat.pipe(stdin=b"/exit\n\n  second\r\n\n")
    assert chat.questions == ["/exit\n\n  second"]


def test_k7_piped_thinking_is_not_printed(chat):
    run = chat.pipe("--think", stdin=b"think hm, well | yes")
    assert run.stdout == b"yes\n"
    assert "hm" not in run.stderr.decode()
    run = chat.pipe("--think", "--max-tokens", "3", stdin=b"think hm, well | yes")
    assert (run.code, run.stdout) == (0, b"")
    assert run.stderr.decode().endswith("· length\n")
    # Without a switch in the template's hands the model may think on its own.
    assert chat.pipe(stdin=b"think hm | yes").stdout == b"yes\n"


def test_k3_noise_of_libraries_goes_to_stderr(chat):
    run = chat.run(stdin=b"noise")
    assert (run.code, run.stdout) == (0, b"quiet\n")
    assert b"noise\n" in run.stderr


@pytest.mark.parametrize("stdin", [b"", b" \n\t\n"])
def test_k35_an_empty_stdin(chat, stdin):
    run = chat.pipe(stdin=stdin, FAKE_LOAD_SECONDS="6000")
    assert (run.code, run.stdout) == (2, b"")
    assert run.err.startswith("error: stdin is empty: there is no message\ntry: ")


def test_k35_no_stdin_at_all(chat):
    command = " ".join(map(repr, chat.command)) + " <&-"
    run = subprocess.run(
        ["sh", "-c", command], capture_output=True, env=chat.environ(), timeout=60, check=False
    )
    assert (run.returncode, run.stdout) == (2, b"")
    assert b"stdin is empty" in run.stderr


def test_stdin_that_is_not_text(chat):
    run = chat.pipe(stdin=b"caf\xe9")
    assert (run.code, run.stdout) == (2, b"")
    assert run.stderr == b"error: stdin is not UTF-8 (byte 0xe9 at 3)\n"


def test_b2_what_cannot_fit_is_refused_before_it_is_encoded(chat, monkeypatch):
    encoded = []
    encode = Tokenizer.encode
    monkeypatch.setattr(
        Tokenizer, "encode", lambda self, text: [encoded.append(len(text)), encode(self, text)][1]
    )
    run = chat.pipe(stdin=b"x" * (5 << 20))
    assert (run.code, run.stdout) == (3, b"")
    assert run.err_lines == [
        "error: this turn needs at least 403,302 tokens; the context has 4,096",
        "try: a shorter message",
    ]
    assert max(encoded) < 1000
    run = chat.pipe(stdin=b"x" * (1 << 26) + b"x")
    assert (run.code, run.stdout) == (2, b"")
    assert run.err == "error: stdin has more than 67,108,864 bytes: no context is so long\n"


def test_a_terminal_for_stdin_alone_is_refused(chat):
    master, slave = pty.openpty()
    run = subprocess.run(
        chat.command, stdin=slave, capture_output=True, env=chat.environ(), timeout=60, check=False
    )
    os.close(master)
    os.close(slave)
    assert (run.returncode, run.stdout) == (2, b"")
    assert b"error: chat needs a terminal on stdout too" in run.stderr
    assert b"try: minivllm generate --prompt TEXT" in run.stderr


def test_k22_exit_codes_of_failures(chat):
    codes = {}
    for script in (b"raise", b"dead", b"echo " + b"x" * 5000):
        run = chat.pipe(stdin=script)
        codes[script[:5]] = run.code
        assert run.stderr.startswith(b"error: ")
        assert b"Traceback" not in run.stderr
        assert len(run.stderr.splitlines()) <= 6
        assert run.stdout in (b"som\n", b"")
    assert codes == {b"raise": 1, b"dead": 3, b"echo ": 3}


def test_h17_sigint_in_the_middle_of_an_answer(chat):
    with subprocess.Popen(
        [*chat.command, "--transcript", "t.jsonl"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=chat.environ(),
        cwd=chat.home,
    ) as process:
        process.stdin.write(b"slow forever")
        process.stdin.close()
        assert process.stdout.read(6) == b"ababab"
        process.send_signal(signal.SIGINT)
        rest, errors = process.stdout.read(), process.stderr.read()
        assert process.wait(30) == 130
    assert re.fullmatch(rb"(ab)*a?\n", rest)
    assert errors == b"stopping. Ctrl-C again to leave at once.\n[interrupted]\n"
    answer = json.loads((chat.home / "t.jsonl").read_text().splitlines()[-1])
    assert answer["interrupted"] is True
    assert answer["content"].startswith("ababab")


def test_k37_a_reader_that_goes_away(chat):
    command = " ".join(map(repr, chat.command)) + " | head -c 1; exit ${PIPESTATUS[0]}"
    run = subprocess.run(
        ["bash", "-c", command],
        input=b"slow forever",
        capture_output=True,
        env=chat.environ(),
        timeout=60,
        check=False,
    )
    assert (run.returncode, run.stdout) == (141, b"a")
    assert b"Traceback" not in run.stderr
    assert run.stderr


def test_a_transcript_across_pipes(chat):
    assert chat.pipe("--transcript", "t.jsonl", stdin=b"echo one").code == 0
    again = chat.pipe("--transcript", "t.jsonl", stdin=b"echo two")
    assert (again.code, again.stdout) == (2, b"")
    assert (
        again.stderr == b"error: t.jsonl exists\ntry: --resume to go on with it, or another name\n"
    )
    more = chat.pipe("--transcript", "t.jsonl", "--resume", stdin=b"echo two")
    assert (more.code, more.stdout) == (0, b"two\n")
    assert "<|im_start|>assistant\none<|im_end|>" in chat.requests[-1]["prompt"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--resume",), b"--resume goes with --transcript FILE"),
        (("--load", "no.json"), b"no.json cannot be read"),
        (("--load", "a.json", "--transcript", "t", "--resume"), b"--load and --resume exclude"),
        (("--think", "--no-think"), b"--think and --no-think exclude each other"),
        (("--sytem", "x"), b"--system"),
        (("--temperature", "-1"), b"--temperature"),
    ],
)
def test_wrong_options_are_found_before_the_model_is_loaded(chat, args, message):
    run = chat.pipe(*args, stdin=b"echo x", FAKE_LOAD_SECONDS="6000")
    assert (run.code, run.stdout) == (2, b"")
    assert message in run.stderr
    assert len(run.stderr.splitlines()) <= 6


def test_thinking_needs_a_template_that_knows_it(tmp_path, scripted_model):
    model = tmp_path / "plain"
    shutil.copytree(scripted_model, model)
    template = model / "chat_template.jinja"
    template.write_text(template.read_text().replace("enable_thinking", "other"))
    chat = Chat(tmp_path, model)
    run = chat.pipe("--think", stdin=b"echo x")
    assert run.code == 2
    assert run.err.startswith("error: --think: the chat template of ")
    assert run.err_lines[1] == "try: drop --think"
    run = chat.pipe(stdin=b"echo x", MINIVLLM_CHAT__THINK="true")
    assert (run.code, run.stdout) == (0, b"x\n")
    assert run.err.startswith("warning: MINIVLLM_CHAT__THINK: the chat template of ")
    template.unlink()
    run = chat.pipe(stdin=b"echo x")
    assert run.code == 2
    assert "has no chat template" in run.err


def test_k21_help_loads_nothing_heavy(chat):
    code = (
        "import sys\n"
        "from minivllm_cli.app import run\n"
        "run(['chat', '--help'])\n"
        "heavy = {'torch', 'transformers', 'prompt_toolkit', 'rich.markdown', 'tokenizers'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env=chat.environ(), check=True
    )
    assert run.stdout.endswith(b"[]\n")
    for option in ("--system", "--transcript", "--think", "--temperature", "--config"):
        assert option.encode() in run.stdout


def test_print_config(chat):
    run = chat.run("--print-config", "--diff-defaults", "--system", "x", "--no-stats")
    assert run.code == 0
    assert b"chat:\n  system: x\n  stats: false\n" in run.stdout


def test_flags_that_switch_off_set_their_keys():
    flags = ChatFlags(no_stats=True, no_history=True, system="x")
    assert flags.typed() == {
        "chat.system": ("--system", "x"),
        "chat.stats": ("--no-stats", False),
        "chat.history": ("--no-history", False),
    }
