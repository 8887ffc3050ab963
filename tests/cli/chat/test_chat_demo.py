"""The chat with the real engine and the demo model."""

import json
import re
import signal
import sys

import pytest

from cli.chat.program import Chat
from cli.chat.terminal import CTRL_C, ENTER
from cli.program import REAL
from minivllm_engine import LLM, SamplingParams


@pytest.fixture
def demo(tmp_path):
    return Chat(tmp_path, "demo", [*REAL, "chat", "demo", "--max-tokens", "12"])


def test_a_pipe_gives_the_answer_that_the_library_gives(demo):
    question = "What does 'aardvark' mean?"
    with LLM("demo") as llm:
        (expected,) = llm.generate(
            [{"messages": [{"role": "user", "content": question}]}], SamplingParams(max_tokens=12)
        )
    piped = demo.pipe("--max-tokens", "12", stdin=question.encode())
    assert (piped.code, piped.out) == (0, expected.text + "\n")
    assert len(piped.stdout) > 12
    assert re.search(r"prompt \d+ = 0 reused \+ \d+ new · ctx \d+/4,096", piped.err)


def test_k12_short_turns_say_what_they_cost(demo):
    with demo.talk("--transcript", "t.jsonl", "--max-tokens", "12") as talk:
        talk.ask("What does 'aardvark' mean?")
        first = talk.ask("/show prompt")
        talk.ask("What kind of thing is it?")
        cache = talk.ask("/show cache")
        undone = talk.ask("/undo")
        assert talk.ask("/show prompt") == first
        talk.ask("What kind of thing is it?")
        assert "blocks" in talk.ask("/show memory")
    assert re.search(r"^KV blocks +0/[\d,]+ used +at most [12] so far$", cache, re.M)
    assert re.search(r"^state slots +0/1 used +at most 1 so far$", cache, re.M)
    rows = [json.loads(line) for line in (demo.home / "t.jsonl").read_text().splitlines()]
    answers = [row for row in rows if row.get("role") == "assistant"]
    assert rows[5] == {"event": "truncate", "messages": 2}
    assert answers[1]["content"] == answers[2]["content"], "greedy, on the same history"
    costs = [answer["stats"]["prompt_tokens"] for answer in answers]
    assert costs[1] == costs[2] > costs[0]
    assert all(answer["stats"]["cached_tokens"] in (0, 64) for answer in answers)
    recompute = int(re.fullmatch(r"undone 1 turn \((\d+) tokens to recompute\)", undone)[1])
    assert costs[0] < recompute < costs[1]


def test_k8_the_real_engine_is_stopped_and_goes_on(demo):
    with demo.open("--ignore-eos", "--max-tokens", "3000") as terminal:
        terminal.wait_for_prompt()
        terminal.type("Define aardvark." + ENTER)
        terminal.wait_until(lambda: len(terminal.lines[1:]) and len(terminal.text) > 110, "text")
        terminal.type(CTRL_C)
        terminal.wait_for("[interrupted]")
        assert "0/1 used" in terminal.ask("/show cache"), "its slot is free again"
        terminal.type("And what kind of thing is it?" + ENTER)
        terminal.watch(1)
        terminal.signal(signal.SIGTERM)
        assert terminal.wait_for_exit() == 143
        assert "Traceback" not in terminal.text


def test_a9_the_first_turn_imports_nothing(demo):
    """What is imported within a turn would be told as the time to its first token."""
    script = """import sys
from minivllm_cli.chat.session import Chat
ask = Chat.ask
def counted(*args, **kwargs):
    before = set(sys.modules)
    output = ask(*args, **kwargs)
    sys.stderr.write(f"imported {sorted(set(sys.modules) - before)}\\n")
    return output
Chat.ask = counted
from minivllm_cli.main import main
main()"""
    demo.command = [sys.executable, "-c", script, "chat", "demo", "--max-tokens", "2"]
    run = demo.run(stdin=b"Define aardvark.")
    assert run.code == 0
    assert "imported []" in run.err_lines
