"""Answers in the REPL: streaming, stopping, failing, thinking, and the figures after each."""

import json
import re
import signal

from cli.chat.terminal import CTRL_C, CTRL_D, ENTER


def _saved(chat, name="a.json"):
    return json.loads((chat.home / name).read_text())


def test_an_answer_and_its_figures(chat):
    with chat.talk("--system", "Be brief.") as talk:
        shown = talk.ask("echo hello")
    answer, figures = shown.split("\n")
    assert answer == "hello"
    assert re.fullmatch(
        r"6 tok · [\d,.]+ tok/s · TTFT \d+\.\d\d s · prompt 48 = 0 reused \+ 48 new "
        r"· ctx 54/4,096 \(1%\) · stop",
        figures,
    )
    (request,) = chat.requests
    assert len(request["ids"]) == 48
    assert request["prompt"] == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\necho hello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_figures_can_be_switched_off(chat):
    with chat.talk("--no-stats") as talk:
        assert talk.ask("echo hello") == "hello"
        talk.ask("/stats on")
        assert "· stop" in talk.ask("echo hello")
        talk.ask("/stats off")
        assert talk.ask("echo hello") == "hello"


def test_k8_ctrl_c_stops_the_answer_and_keeps_what_came(chat):
    with chat.open() as terminal:
        for keys in (CTRL_C, CTRL_C + CTRL_C):  # a second one in haste does not leave
            terminal.wait_for_prompt()
            begun = len(terminal.text)
            terminal.type("slow forever" + ENTER)
            terminal.wait_until(lambda b=begun: "abab" in terminal.text[b:], "the answer")
            terminal.type(keys)
            terminal.wait_until(lambda b=begun: "[interrupted]" in terminal.text[b:], "a mark")
            terminal.wait_for_prompt()
        assert "· abort" in terminal.text
        terminal.ask("echo next")
        terminal.ask("/save a.json")
    answer = _saved(chat)["messages"][1]
    assert answer["interrupted"] is True
    assert answer["finish_reason"] == "abort"
    assert re.fullmatch("(ab)+a?", answer["content"])
    turn = f"<|im_start|>assistant\n{answer['content']}<|im_end|>\n<|im_start|>user\n"
    assert turn in chat.requests[-1]["prompt"]


def test_k8_stopping_while_the_prompt_is_read(chat):
    with chat.open() as terminal:
        terminal.ask("echo one")
        terminal.type("prefill 50 echo two" + ENTER)
        progress = re.compile(r"prompt \d+/\d+ \(\d+%\)")
        terminal.wait_until(lambda: progress.search(terminal.text), "how far it is, after a second")
        terminal.type(CTRL_C)
        terminal.wait_for("stopped before the first token; the chat is as it was")
        terminal.wait_for_prompt()
        assert not progress.search(terminal.text), "progress is wiped away"
        assert "system 0 + history " in terminal.ask("/tokens")
        terminal.ask("/save a.json")
    assert [m["content"] for m in _saved(chat)["messages"]] == ["echo one", "one"]


def test_a_turn_that_was_dropped_gives_no_figures_and_no_warning(chat):
    with chat.talk("--max-model-len", "100") as talk:
        chat_in_progress = talk.repl.chat

        def stopped(view, stop):
            stop.request()
            question = "echo " + "x" * 60
            return chat_in_progress.ask(chat_in_progress.transcript, question, view, stop)

        talk.repl.turn(stopped)
        assert talk.text.endswith("\nstopped before the first token; the chat is as it was\n")
        assert "warning" not in talk.text and "ctx" not in talk.text
    assert len(chat.requests[0]["ids"]) >= 80, "else there would be no warning in any case"


def test_k8_the_chat_survives_the_engine(chat):
    with chat.talk() as talk:
        talk.ask("echo one")
        shown = talk.ask("raise")
        assert "error: engine failed: the fan fell off" in shown
        assert "Traceback" not in shown
        crash = next(chat.history.parent.glob("crash-*.json"))
        assert "the fan fell off" in crash.read_text()
        assert "echo one" in crash.read_text(), "the transcript is in the crash file"
        assert "error: the logits are not finite" in talk.ask("dead")
        assert talk.ask("echo two").startswith("two\n")
        talk.ask("/save a.json")
    contents = [message["content"] for message in _saved(chat)["messages"]]
    assert contents == ["echo one", "one", "echo two", "two"]


def test_h17_a_step_that_hangs_can_be_left(chat):
    with chat.open() as terminal:
        terminal.wait_for_prompt()
        terminal.ask("echo one")
        terminal.type("stuck echo two" + ENTER)
        terminal.watch(0.5)
        terminal.type(CTRL_C)
        terminal.wait_for("stopping after this step. Ctrl-C again leaves the chat at once.")
        terminal.type(CTRL_C)
        assert terminal.wait_for_exit() == 130
        assert "Traceback" not in terminal.text


def test_h17_interrupt_while_loading(chat):
    with chat.open(FAKE_LOAD_SECONDS="60") as terminal:
        terminal.wait_for("weights")
        terminal.type(CTRL_C)
        terminal.wait_for("stopping while loading the model")
        assert terminal.wait_for_exit(30) == 130
        assert "Traceback" not in terminal.text


def test_h17_sigterm_at_the_prompt_and_during_an_answer(chat):
    with chat.open() as terminal:
        terminal.wait_for_prompt()
        terminal.signal(signal.SIGTERM)
        assert terminal.wait_for_exit() == 143
        assert "stopping: SIGTERM" in terminal.text
        assert "Traceback" not in terminal.text
    with chat.open("--transcript", "t.jsonl") as terminal:
        terminal.wait_for_prompt()
        terminal.type("slow forever" + ENTER)
        terminal.wait_for("abab")
        terminal.signal(signal.SIGTERM)
        assert terminal.wait_for_exit() == 143
        assert "Traceback" not in terminal.text
    answer = json.loads((chat.home / "t.jsonl").read_text().splitlines()[-1])
    assert answer["interrupted"] is True
    assert answer["content"].startswith("abab")


def test_k6_a_turn_over_the_context_is_refused(chat):
    question = "echo " + "y" * 80
    with chat.talk("--max-model-len", "256", "--system", "Be brief.") as talk:
        talk.ask("echo one")
        talk.ask("echo " + "x" * 60)
        before = talk.ask("/tokens")
        lines = talk.ask(question).split("\n")
        assert talk.ask("/tokens") == before
        assert len(chat.requests) == 2, "no engine call for the refused turn"
        assert talk.ask("/undo 1").startswith("undone 1 turn (")
        assert "y" * 80 in talk.ask(question)
    what = re.fullmatch(
        r"error: this turn needs (\d+) tokens, (\d+) over the context of 256", lines[0]
    )
    why = re.fullmatch(
        r"why: system (\d+) \+ history (\d+) \+ your message (\d+) \+ 1 for an answer", lines[1]
    )
    hint = re.fullmatch(
        r"try: /undo 1 \(frees (\d+)\) · /clear · "
        r"restart with --max-model-len 1024 \(fits\)",
        lines[2],
    )
    assert what and why and hint, lines
    assert len(lines) == 3
    needed = int(what[1])
    assert sum(map(int, why.groups())) + 1 == needed
    assert int(what[2]) == needed - 256
    assert int(why[1]) == len("system\nBe brief.\n") + 2
    assert int(why[3]) == len("user\n\nassistant\n" + question) + 3
    # What it proposes is true to the token.
    assert len(chat.requests[-1]["ids"]) == needed - int(hint[1]) - 1


def test_k6_a_message_that_never_fits(chat):
    with chat.talk("--max-model-len", "4096") as talk:
        talk.ask("echo one")
        assert talk.ask("z" * 5000).endswith("try: a shorter message")
    assert len(chat.requests) == 1


def test_the_context_fills_up_with_one_warning(chat):
    with chat.talk("--max-model-len", "100") as talk:
        assert "warning" not in talk.ask("echo 12345678901234567890")
        shown = talk.ask("echo 1")
        assert "warning: the context is 9" in shown
        assert "% full: " in shown


def test_no_way_is_named_that_does_not_work_when_max_tokens_ends_the_thinking(chat):
    with chat.talk("--think", "--max-tokens", "3") as talk:
        shown = " ".join(talk.ask("think a long thought | ok").split())
        assert (
            "stopped at max_tokens before the answer began; /set max_tokens N, then /regen" in shown
        )
        assert "/continue" not in shown
        refused = talk.ask("/continue")
        assert "error: there is no answer to extend" in refused
        assert refused.endswith("try: /set max_tokens N, then /regen")
        talk.ask("/set max_tokens 40")
        assert "\nok\n" in talk.ask("/regen 1")


def test_max_tokens_and_context_ends_are_told_apart(chat):
    with chat.talk("--max-model-len", "64") as talk:
        assert talk.ask("forever").split("\n")[1].endswith("· context")
        talk.ask("/clear")
        talk.ask("/set max_tokens 4")
        answer, figures, note = talk.ask("forever").split("\n")
        assert answer == "abab"
        assert figures.endswith("· length")
        assert note.startswith("stopped at max_tokens; /continue goes on")
        assert talk.ask("/continue").startswith("+mor\n")


def test_k7_thinking_is_apart_from_the_answer(chat):
    with chat.open("--think") as terminal:
        shown = terminal.ask("think hm, let me see | yes")
        assert re.fullmatch(r"hm, let me see\n· thought \d+ tok, \d+\.\d s\nyes\n21 tok .*", shown)
        assert b"\x1b[2mh\x1b[0m" in terminal.raw, "thinking is dimmed"
        terminal.ask("/think show")
        since = len(terminal.raw)
        terminal.ask("think hm | yes")
        assert b"hm" in terminal.raw[since:].replace(b"\x1b[2m", b"!")
        terminal.ask("/think hide")
        assert re.fullmatch(
            r"· thought \d+ tok, \d+\.\d s\nyes\n.*", terminal.ask("think hush | yes")
        )
        terminal.ask("/set max_tokens 5")
        assert re.fullmatch(
            r"· thought 5 tok, \d+\.\d s\n5 tok .* length\n.*",
            terminal.ask("think without end | no"),
        )
        terminal.ask("/save a.json")
    messages = _saved(chat)["messages"]
    assert (messages[1]["content"], messages[1]["reasoning"]) == ("yes", "hm, let me see")
    assert (messages[-1]["content"], messages[-1]["reasoning"]) == ("", "witho")
    assert "hm" not in chat.requests[-1]["prompt"].replace("think hm", "")


def test_thinking_is_switched_and_kept(chat):
    with chat.talk() as talk:
        talk.ask("/think on")
        talk.ask("think deep | a")
        assert chat.requests[-1]["prompt"].endswith("assistant\n<think>\n")
        assert "kept in the history" in talk.ask("/think keep")
        talk.ask("/think off")
        talk.ask("echo b")
        prompt = chat.requests[-1]["prompt"]
        assert "<|im_start|>assistant\n<think>\ndeep\n</think>\n\na<|im_end|>" in prompt
        assert prompt.endswith("assistant\n<think>\n\n</think>\n\n")
        assert "not kept" in talk.ask("/think drop")
        talk.ask("echo c")
        assert "deep" not in chat.requests[-1]["prompt"].replace("think deep", "")
        shown = talk.ask("/think of")
        assert shown == "error: /think of: no such choice\ntry: off"


def test_k11_a_long_answer_appears_once_although_the_window_changes(chat):
    with chat.open("--max-tokens", "4000", columns=80) as terminal:
        terminal.wait_for_prompt()
        terminal.type("lines 200" + ENTER)
        terminal.wait_for("line 80 ")
        terminal.resize(30, 70)
        terminal.wait_for("line 200 ")
        terminal.wait_for("· stop")
        counted = [line for line in terminal.lines if line.startswith("line ")]
    assert [int(line.split()[1]) for line in counted] == list(range(1, 201))
    assert all("🙂" in line for line in counted)


def test_k31_what_comes_of_the_model_is_shown_as_text(chat):
    with chat.open() as terminal:
        assert terminal.ask("echo 🙂é漢🙂").startswith("🙂é漢🙂\n")
        terminal.type("slow echo 🙂🙂🙂🙂🙂🙂🙂🙂" + ENTER)
        terminal.wait_for("\n🙂🙂")
        terminal.watch(0.08)
        terminal.type(CTRL_C)
        terminal.wait_for_prompt()
        assert "\ufffd" not in terminal.text
        assert terminal.ask("controls").startswith("a[2Jbc")
        assert b"a[2Jbc" in terminal.raw
        terminal.ask("noise")
        terminal.ask("/save a.json")
        terminal.type(CTRL_D)
        terminal.wait_for_exit()
    answers = [message["content"] for message in _saved(chat)["messages"][1::2]]
    assert re.fullmatch("🙂+", answers[1])
    assert answers[2:] == ["a\x1b[2Jb\x07\x9bc\tend", "quiet"]


def test_no_colour_where_it_is_not_wanted(chat):
    with chat.talk("--think") as talk:
        assert "\x1b" not in talk.ask("think hm | yes")
        talk.repl.screen.colour = True
        assert "\x1b[2mh\x1b[0m" in talk.ask("think hm | yes")
