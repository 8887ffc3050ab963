"""The chat with the real engine and the demo model."""

import json
import re
import signal

import pytest

from cli.chat.program import Chat
from cli.chat.terminal import CTRL_C, CTRL_D, ENTER
from cli.program import REAL


@pytest.fixture
def demo(tmp_path):
    return Chat(tmp_path, "demo", [*REAL, "chat", "demo", "--max-tokens", "12"])


def test_a_pipe_gives_the_answer_that_generate_gives(demo, tmp_path):
    question = "What does 'aardvark' mean?"
    generate = Chat(tmp_path, "demo", [*REAL, "generate", "demo", "--max-tokens", "12"])
    expected = generate.run("--prompt", question)
    piped = demo.run(stdin=question.encode())
    assert (piped.code, piped.stdout) == (0, expected.stdout)
    assert len(piped.stdout) > 12
    assert re.search(r"prompt \d+ = 0 reused \+ \d+ new · ctx \d+/4,096", piped.err)


def test_k12_short_turns_say_what_they_cost(demo):
    with demo.open("--transcript", "t.jsonl") as terminal:
        terminal.ask("What does 'aardvark' mean?")
        first = terminal.ask("/show prompt")
        terminal.ask("What kind of thing is it?")
        cache = terminal.ask("/show cache")
        undone = terminal.ask("/undo")
        assert terminal.ask("/show prompt") == first
        terminal.ask("What kind of thing is it?")
        assert "blocks" in terminal.ask("/show memory")
        terminal.type(CTRL_D)
        assert terminal.wait_for_exit() == 0
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
