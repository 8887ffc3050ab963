"""Slash commands in the REPL."""

import json
import os
import re

import pytest

from cli.chat.terminal import CTRL_C, CTRL_D, ENTER
from minivllm_cli.chat.commands import COMMANDS, complete


def _messages(chat, name="a.json"):
    return json.loads((chat.home / name).read_text())["messages"]


def test_completions():
    assert ("/undo", "drop the last turn, or N turns") in complete("/u")
    assert dict(complete("/set t")).keys() >= {"temperature", "top_p"}
    assert [word for word, _ in complete("/show ")][:2] == ["settings", "stats"]
    assert complete("/set temperature ") == []
    assert complete("/save ") is None
    assert complete("/nothing ") == []


def test_every_command_has_a_line_of_help_that_fits():
    for command in COMMANDS:
        assert command.help
        assert len(f"{command.name} {command.usage}") <= 18
        assert 20 + len(command.help) <= 80


def test_wrong_lines_are_neither_sent_nor_fatal(chat):
    with chat.talk() as talk:
        assert talk.ask("/hlep") == (
            "error: unknown command /hlep\n"
            "why: nothing was sent\n"
            "try: /help, or //hlep to say it to the model"
        )
        assert "/undo x: not a whole number" in talk.ask("/undo x")
        assert "cannot undo 1 turn: the chat has 0" in talk.ask("/undo")
        assert "nothing has been asked yet" in talk.ask("/regen")
        assert "/clear takes no argument" in talk.ask("/clear all")
        assert "/set temprature: no such key" in talk.ask("/set temprature 1")
        assert "/set temperature -1" in talk.ask("/set temperature -1")
        assert "/set temperature x" in talk.ask("/set temperature x")
        wrong = talk.ask("/set temperature=abc")
        assert wrong == "error: /set temperature=abc: should be a valid number"
        assert talk.ask("/set temperature=0.25") == "temperature 0.25"
        assert "/set temprature: no such key" in talk.ask("/set temprature=1")
        assert "/seed x: not a whole number" in talk.ask("/seed x")
        assert "/show setings: no such topic" in talk.ask("/show setings")
        assert "try: /show settings" in talk.text
        assert "no branch x" in talk.ask("/branches x")
        assert "a.txt: cannot tell the form" in talk.ask("/save a.txt")
        assert "no.json cannot be read" in talk.ask("/load no.json")
        assert "cannot read no.txt: " in talk.ask("/system @no.txt")
        assert chat.requests == []
        assert talk.ask("//usr/bin").startswith("</usr/bin>\n")
        assert "Traceback" not in talk.text


def test_k10_undo_goes_back_to_the_very_same_prompt(chat):
    with chat.talk("--system", "Be brief.") as talk:
        talk.ask("echo one")
        first = talk.ask("/show prompt")
        talk.ask("echo two")
        talk.ask("echo three")
        shown = talk.ask("/undo 2")
        assert talk.ask("/show prompt") == first
        cost = int(re.fullmatch(r"undone 2 turns \((\d+) tokens to recompute\)", shown)[1])
        talk.ask("echo four")
    rendered, _, count = first.rpartition("\n")
    assert rendered.replace("\n", "") == chat.prompts[0].replace("\n", "")
    assert count == f"({len(chat.requests[0]['ids'])} tokens)"
    history = chat.prompts[3].partition("<|im_start|>user\necho four")[0]
    assert "three" not in history
    question = "<|im_start|>user\necho four<|im_end|>\n<|im_start|>assistant\n"
    assert cost == len(chat.requests[3]["ids"]) - (len("user\necho four\nassistant\n") + 3)
    assert chat.prompts[3] == history + question


def test_k10_an_answer_is_made_again(chat):
    with chat.talk("--temperature", "0.8") as talk:
        first = talk.ask("seeded").split("\n")[0]
        again = talk.ask("/regen 7").split("\n")[0]
        third = talk.ask("/regen").split("\n")
        assert talk.ask("/regen 7").split("\n")[0] == again == "seed 7 output 0"
        talk.ask("/save a.json")
        assert re.fullmatch(r"seed \d+ output 0", first)
        assert third[1] == f"{third[0]} output 0", "the drawn seed is said, and used"
        assert third[1] not in (first, again)
        assert [m["content"] for m in _messages(chat)] == ["seeded", "seed 7 output 0"]
        assert _messages(chat)[1]["stats"]["seed"] == 7
        talk.ask("/set temperature 0")
        assert "every seed gives the same answer" in talk.ask("/regen")
    prompts = chat.prompts
    assert prompts == prompts[:1] * 5


def test_k10_questions_and_answers_are_edited(chat):
    with chat.talk() as talk:
        talk.ask("echo one")
        assert talk.ask("/edit", "echo one!").startswith("one!\n")
        assert talk.ask("/edit-reply", "one!!!").startswith("answer replaced (")
        assert talk.ask("/continue").startswith("+more\n")
        assert talk.offered == ["echo one", "one!"]
        talk.ask("/save a.json")
        assert [m["content"] for m in _messages(chat)] == ["echo one!", "one!!!+more"]
        assert chat.prompts[-1].endswith("<|im_start|>assistant\none!!!")
        assert talk.ask("/edit", "  ") == talk.ask("/edit-reply", None) == "nothing was changed"
        talk.ask("/clear")
        assert "there is no answer to extend" in talk.ask("/continue")


def test_an_edit_is_given_up(chat):
    with chat.open() as terminal:
        terminal.ask("echo one")
        for key, command, old in (
            (CTRL_C, "/edit", "echo one"),
            (CTRL_D, "/edit", "echo one"),
            (CTRL_C, "/edit-reply", "one"),
            (CTRL_D, "/edit-reply", "one"),
        ):
            before = terminal.text.count("nothing was changed")
            terminal.type(command + ENTER)
            terminal.wait_until(lambda old=old: terminal.cursor_line == f"edit> {old}", "the text")
            terminal.type(" and more" + key)
            terminal.wait_until(
                lambda n=before: terminal.text.count("nothing was changed") > n, "a note"
            )
            terminal.wait_for_prompt()
        terminal.type("/edit" + ENTER)
        terminal.wait_until(lambda: terminal.cursor_line == "edit> echo one", "the old question")
        terminal.type("!" + ENTER)
        terminal.wait_for("\none!\n")
        terminal.wait_for_prompt()
    assert chat.questions == ["echo one", "echo one!"]


def test_clear_keeps_system_text_and_settings(chat):
    with chat.talk("--system", "Be brief.") as talk:
        talk.ask("/set temperature 0.25")
        talk.ask("echo one")
        assert talk.ask("/clear").startswith("cleared 1 turn; /branches before-clear")
        talk.ask("echo two")
        talk.ask("/branches before-clear")
        talk.ask("echo three")
    system = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
    assert [prompt.startswith(system) for prompt in chat.prompts] == [True] * 3
    assert "one" not in chat.prompts[1]
    assert "two" not in chat.prompts[2] and "one" in chat.prompts[2]
    assert {row["params"]["temperature"] for row in chat.requests} == {0.25}


def test_branches(chat):
    with chat.talk() as talk:
        talk.ask("echo one")
        assert talk.ask("/fork left").startswith("kept as branch left (1 turn)")
        assert "there is a branch left already" in talk.ask("/fork left")
        talk.ask("echo two")
        assert talk.ask("/branches") == "left  1 turn"
        assert talk.ask("/branches left").startswith("on branch left: 1 turn (")
        assert talk.ask("/branches") == "left  1 turn  (here)\nbefore-switch  2 turns"
        talk.ask("echo three")
    assert "two" not in chat.prompts[2]


def test_what_was_said_after_a_switch_is_kept_at_the_next_one(chat):
    with chat.talk() as talk:
        talk.ask("echo one")
        talk.ask("/fork A")
        talk.ask("echo two")
        assert talk.ask("/branches A").endswith("kept: /branches before-switch")
        talk.ask("echo zebra")
        assert talk.ask("/branches before-switch").endswith("kept: /branches before-switch-2")
        back = talk.ask("/branches A")
        assert back.endswith("kept: /branches before-switch"), "it was there: no further copy"
        assert talk.ask("/branches A").count("\n") == 0, "nothing was left"
        assert talk.ask("/branches").split("\n") == [
            "A  1 turn  (here)",
            "before-switch  2 turns",
            "before-switch-2  2 turns",
        ]
        talk.ask("/branches before-switch-2")
        talk.ask("echo end")
    assert "zebra" in chat.prompts[-1] and "two" not in chat.prompts[-1]


def test_each_clear_keeps_what_it_cleared(chat):
    with chat.talk() as talk:
        talk.ask("echo one")
        assert "; /branches before-clear brings" in talk.ask("/clear")
        assert talk.ask("/clear") == "cleared 0 turns"
        talk.ask("echo two")
        assert "; /branches before-clear-2 brings" in talk.ask("/clear")
        talk.ask("/branches before-clear")
        assert "; /branches before-clear brings" in talk.ask("/clear")
        assert talk.ask("/branches") == "before-clear  1 turn\nbefore-clear-2  1 turn"


@pytest.mark.parametrize("args", [(), ("--transcript", "t.jsonl")])
def test_each_load_keeps_the_chat_it_replaces(chat, args):
    with chat.talk(*args) as talk:
        talk.ask("echo one")
        talk.ask("/save a.json")
        talk.ask("echo two")
        kept = "the chat so far is kept: /branches before-load"
        assert talk.ask("/load a.json") == f"loaded 1 turn from a.json\n{kept}"
        assert talk.ask("/load a.json") == "loaded 1 turn from a.json", "the same chat"
        talk.ask("echo three")
        assert talk.ask("/load a.json") == f"loaded 1 turn from a.json\n{kept}-2"
        assert talk.ask("/branches") == "before-load  2 turns\nbefore-load-2  2 turns"
        talk.ask("/branches before-load")
        talk.ask("echo end")
    assert "two" in chat.prompts[-1] and "three" not in chat.prompts[-1]


def test_a_fork_without_a_name_takes_a_free_one(chat):
    with chat.talk() as talk:
        talk.ask("/fork branch-2")
        for name in ("branch-1", "branch-3"):
            assert talk.ask("/fork").startswith(f"kept as branch {name} (")


def test_the_system_text_is_replaced_never_doubled(chat):
    (chat.home / "s.txt").write_text("From a file.\n")
    with chat.talk("--system", "one") as talk:
        talk.ask("echo a")
        assert re.fullmatch(
            r"system text replaced \(\d+ tokens to recompute\)", talk.ask("/system two words")
        )
        assert talk.ask("/system") == "two words"
        talk.ask("echo b")
        talk.ask("/system @s.txt")
        talk.ask("echo c")
        assert talk.ask("/system -").startswith("system text removed (")
        talk.ask("echo d")
    systems = [re.findall(r"system\n(.*?)<", prompt) for prompt in chat.prompts]
    assert systems == [["one"], ["two words"], ["From a file."], []]


def test_settings_and_where_they_come_from(chat):
    (chat.home / "c.yaml").write_text("sampling:\n  top_p: 0.9\n")
    args = ("--config", "c.yaml", "--temperature", "0.5")
    with chat.talk(*args, MINIVLLM_SAMPLING__TOP_K="40") as talk:
        assert talk.ask("/set min_p 0.1") == "min_p 0.1"
        assert talk.ask('/set stop ["\\n\\n", END]') == 'stop ["\\n\\n", END]'
        shown = talk.ask("/show settings")
        talk.ask("echo a")
        assert talk.ask("/set min_p null") == "min_p 0.0"
        assert talk.ask("/seed 9") == "seed 9"
        talk.ask("echo b")
    rows = {line.split("  ")[0]: re.split(" {2,}", line)[1:] for line in shown.split("\n")}
    assert rows["temperature"] == ["0.5", "--temperature (default 1.0)"]
    assert rows["top_p"] == ["0.9", "c.yaml:2 (default 1.0)"]
    assert rows["top_k"] == ["40", "MINIVLLM_SAMPLING__TOP_K (default -1)"]
    assert rows["min_p"] == ["0.1", "/set (default 0.0)"]
    assert rows["max_tokens"] == ["2048", "default"]
    assert rows["seed"][1].startswith("drawn")
    params = [row["params"] for row in chat.requests]
    assert params[0]["min_p"] == 0.1 and params[1]["min_p"] == 0.0
    assert params[0]["stop"] == ["\n\n", "END"]
    assert str(params[0]["seed"]) == rows["seed"][0]
    assert params[1]["seed"] == 9
    assert (params[0]["temperature"], params[0]["top_p"], params[0]["top_k"]) == (0.5, 0.9, 40)


def test_what_can_be_shown(chat):
    with chat.talk() as talk:
        talk.ask("echo one")
        stats = talk.ask("/show stats")
        assert re.search(r"^answers +1$", stats, re.M)
        assert re.search(r"^answer tokens +4$", stats, re.M)
        cache = talk.ask("/show cache")
        assert re.search(r"^KV blocks +0/[\d,]+ used +at most 1 so far$", cache, re.M)
        assert re.search(r"^state slots +0/1 used +at most 1 so far$", cache, re.M)
        memory = talk.ask("/show memory")
        assert re.search(r"^state slots +1 × [\d.]+ KiB = [\d.]+ KiB$", memory, re.M)
        assert re.search(r"^process, at its peak +[\d.]+ MiB$", memory, re.M)
        model = talk.ask("/show model")
        assert re.search(r"^layers +8: 6 DeltaNet, 2 attention$", model, re.M)
        assert re.search(r"^context +4,096 of at most 4,096$", model, re.M)
        assert talk.ask("/tokens") == "system 0 + history 32 = 32 of 4,096 tokens (0%)"


def test_k9_saving_and_loading(chat):
    with chat.talk("--system", "Be brief.", "--seed", "5") as talk:
        talk.ask("echo 🙂 one")
        assert talk.ask("/save a.json") == "saved 1 turn to a.json"
        talk.ask("/save a.md")
        talk.ask("/save a.jsonl")
        talk.ask("echo two")
        assert talk.ask("/save a.json", "n") == "not saved"
        assert len(_messages(chat)) == 3
        assert "before-load" in talk.ask("/load a.json")
        talk.ask("echo three")
        assert talk.repl.chat.num_unsaved_turns == 1
        assert talk.ask("/save a.json", "y") == "saved 2 turns to a.json"
        assert talk.repl.chat.num_unsaved_turns == 0
    contents = [message["content"] for message in _messages(chat)]
    assert contents == ["Be brief.", "echo 🙂 one", "🙂 one", "echo three", "three"]
    markdown = (chat.home / "a.md").read_text()
    assert markdown.startswith("# Chat with scripted\n\nseed 5")
    assert "## You\n\necho 🙂 one\n\n## scripted\n\n🙂 one\n" in markdown
    document = json.loads((chat.home / "a.json").read_text())
    assert document["model"]["name"] == "scripted"
    assert re.fullmatch("sha256:[0-9a-f]{64}", document["model"]["hash"])
    assert document["settings"]["seed"] == 5
    stats = document["messages"][2]["stats"]
    assert stats["prompt_tokens"] == len(chat.requests[0]["ids"])
    assert stats["completion_tokens"] == 9 and stats["cached_tokens"] == 0


def test_k9_a_transcript_survives_a_kill(chat):
    with chat.open("--transcript", "t.jsonl", "--system", "Be brief.") as terminal:
        terminal.ask("echo one")
        terminal.ask("echo two")
        terminal.type("slow forever" + ENTER)
        terminal.wait_for("abab")
        terminal.process.kill()
        terminal.process.wait()
    rows = [json.loads(line) for line in (chat.home / "t.jsonl").read_text().splitlines()]
    assert rows[0]["kind"] == "chat"
    assert [row["content"] for row in rows[1:]] == [
        "Be brief.",
        "echo one",
        "one",
        "echo two",
        "two",
    ]
    with (chat.home / "t.jsonl").open("a") as file:
        file.write('{"role":"user","con')
    with chat.talk("--transcript", "t.jsonl", "--resume") as talk:
        assert talk.shown_at_start == "going on with t.jsonl: 2 turns\n"
        talk.ask("/undo")
        talk.ask("echo three")
        assert talk.repl.chat.num_unsaved_turns == 0
    assert "echo one" in chat.prompts[-1] and "echo two" not in chat.prompts[-1]
    with chat.talk("--load", "t.jsonl") as talk:
        talk.ask("/save b.json")
    contents = [message["content"] for message in _messages(chat, "b.json")]
    assert contents == ["Be brief.", "echo one", "one", "echo three", "three"]


def test_k38_loading_restores_what_was_set(chat):
    args = ("--temperature", "0.25", "--system", "Be brief.", "--think", "--seed", "3")
    with chat.talk(*args) as talk:
        talk.ask("/set top_k 12")
        talk.ask("echo one")
        talk.ask("/save a.json")
    with chat.talk("--temperature", "0.75", "--no-think") as talk:
        shown = talk.ask("/load a.json")
        talk.ask("echo two")
    assert shown.split("\n") == [
        "loaded 1 turn from a.json",
        "temperature 0.25 (a.json; --temperature said 0.75)",
        "think true (a.json; --no-think said false)",
    ]
    with chat.talk("--load", "a.json", "--temperature", "0.75") as talk:
        assert "temperature 0.75 (--temperature; a.json has 0.25)" in talk.shown_at_start
        talk.ask("echo three")
    by_prompt, by_flag = chat.requests[1], chat.requests[2]
    for request in (by_prompt, by_flag):
        assert request["prompt"].startswith("<|im_start|>system\nBe brief.<|im_end|>\n")
        assert request["prompt"].endswith("<|im_start|>assistant\n<think>\n")
        assert request["params"]["seed"] == 3
        assert request["params"]["top_k"] == 12
    assert by_prompt["params"]["temperature"] == 0.25
    assert by_flag["params"]["temperature"] == 0.75


def test_the_text_can_be_written_in_an_editor_and_a_question_is_answered(chat):
    editor = chat.home / "editor.sh"
    editor.write_text('#!/bin/sh\nprintf "echo from\\nthe editor" > "$1"\n')
    os.chmod(editor, 0o755)
    with chat.open(EDITOR=str(editor), VISUAL="") as terminal:
        terminal.wait_for_prompt()
        terminal.type("draft\x18\x05")
        terminal.wait_for("the editor")
        terminal.watch(0.3)
        if not chat.requests:
            terminal.type(ENTER)
        terminal.wait_for("· stop")
        terminal.ask("/save a.json")
        terminal.type("/save a.json" + ENTER)
        terminal.wait_for("a.json exists. Overwrite it? [y/N]")
        terminal.type("n" + ENTER)
        terminal.wait_for("not saved")
    assert chat.questions == ["echo from\nthe editor"]
