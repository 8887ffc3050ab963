"""Saved chats: three forms out, two back in, and files that are none."""

import json
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from minivllm_cli.chat.saved_chat import SavedChat, TranscriptFile, load_chat, save_chat
from minivllm_cli.chat.transcript import Message, Transcript
from minivllm_cli.errors import CliError

CHAT = SavedChat(
    model={"name": "demo", "hash": "sha256:00"},
    settings={"temperature": 0.7, "seed": 7, "think": True},
    transcript=Transcript("Be brief.")
    .asked("Hi 🙂\u2028there")
    .answered(
        Message(
            "assistant",
            "Hel",
            reasoning="greet",
            interrupted=True,
            finish_reason="abort",
            stats={"prompt_tokens": 12, "ttft_s": 0.21},
        )
    ),
)


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.JSON"])
def test_round_trip(tmp_path, name):
    save_chat(CHAT, tmp_path / name)
    assert load_chat(tmp_path / name) == CHAT


def test_the_json_form(tmp_path):
    save_chat(CHAT, tmp_path / "a.json")
    assert json.loads((tmp_path / "a.json").read_text()) == {
        "schema_version": 1,
        "kind": "chat",
        "model": {"name": "demo", "hash": "sha256:00"},
        "settings": {"temperature": 0.7, "seed": 7, "think": True},
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi 🙂\u2028there"},
            {
                "role": "assistant",
                "content": "Hel",
                "reasoning": "greet",
                "interrupted": True,
                "finish_reason": "abort",
                "stats": {"prompt_tokens": 12, "ttft_s": 0.21},
            },
        ],
    }


def test_the_jsonl_form_is_a_header_and_a_message_a_line(tmp_path):
    save_chat(CHAT, tmp_path / "a.jsonl")
    header, *messages = [
        json.loads(line) for line in (tmp_path / "a.jsonl").read_bytes().splitlines()
    ]
    assert header["kind"] == "chat"
    assert "messages" not in header
    assert [message["role"] for message in messages] == ["system", "user", "assistant"]


def test_the_markdown_form(tmp_path):
    save_chat(CHAT, tmp_path / "a.md")
    assert (tmp_path / "a.md").read_text() == (
        "# Chat with demo\n\n"
        "temperature 0.7 · seed 7 · think true\n\n"
        "## System\n\nBe brief.\n\n"
        "## You\n\nHi 🙂\u2028there\n\n"
        "## demo\n\n> greet\n\nHel\n\n*[interrupted]*\n"
    )
    with pytest.raises(CliError, match="for reading only"):
        load_chat(tmp_path / "a.md")


def test_replacing_keeps_the_mode_and_follows_links(tmp_path):
    target, link = tmp_path / "t.json", tmp_path / "link.json"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to(target)
    save_chat(CHAT, link)
    assert link.is_symlink()
    assert load_chat(target) == CHAT
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert sorted(os.listdir(tmp_path)) == ["link.json", "t.json"]


def test_a_lone_surrogate_can_be_saved(tmp_path):
    broken = SavedChat(transcript=Transcript().asked("a\ud800"))
    save_chat(broken, tmp_path / "a.json")
    assert load_chat(tmp_path / "a.json").transcript.last_question == "a\ufffd"


@pytest.mark.parametrize(
    ("name", "what", "hint"),
    [
        ("a.txt", "cannot tell the form", ".json, .jsonl, .md"),
        ("a", "cannot tell the form", ".json, .jsonl, .md"),
        ("no/such/a.json", "cannot be written", None),
    ],
)
def test_names_that_cannot_be_written(tmp_path, name, what, hint):
    with pytest.raises(CliError, match=what) as caught:
        save_chat(CHAT, tmp_path / name)
    assert hint is None or hint in caught.value.problems[0].hint


HEADER = '{"schema_version":1,"kind":"chat","model":{},"settings":{}}\n'


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("a.json", b"", "not JSON"),
        ("a.json", b"[]", "an array"),
        ("a.json", b'{"kind":"chat"}', "no list `messages`"),
        ("a.json", b'{"schema_version":1,"kind":"bench","messages":[]}', "kind is 'bench'"),
        ("a.json", b'{"schema_version":9,"kind":"chat","messages":[]}', "schema_version is 9"),
        ("a.json", b'{"schema_version":1,"kind":"chat","messages":[1]}', "no JSON object"),
        ("a.json", b'{"schema_version":1,"kind":"chat","kind":"chat","messages":[]}', "duplicate"),
        ("a.json", b"\xff", "not UTF-8"),
        ("a.jsonl", b"", "empty"),
        ("a.jsonl", HEADER.encode() + b'{"role":"tool","content":"x"}\n', "role is 'tool'"),
        ("a.jsonl", HEADER.encode() + b'{"role":"user","content":3}\n', "no text"),
        ("a.jsonl", HEADER.encode() + b'{"event":"dance"}\n', "unknown event 'dance'"),
        ("a.jsonl", HEADER.encode() + b'{"event":"truncate","messages":-1}\n', "cannot keep -1"),
        ("a.jsonl", HEADER.encode() + b'{"role":"assistant","content":"a"}\n', "not in turn"),
        (
            "a.jsonl",
            HEADER.encode() + 2 * b'{"role":"user","content":"q"}\n',
            "not in turn",
        ),
        (
            "a.jsonl",
            HEADER.encode()
            + b'{"role":"user","content":"q"}\n'
            + b'{"role":"assistant","content":"a","reasoning":["x"]}\n',
            "reasoning is no text",
        ),
        ("a.jsonl", HEADER.encode() + b'x\n{"role":"user","content":"q"}\n', "not JSON"),
        (
            "a.jsonl",
            HEADER.encode() + b'{"role":"user","content":"q"}\n{"role":"system","content":"s"}\n',
            "can only come first",
        ),
    ],
)
def test_files_that_are_no_saved_chat(tmp_path, name, data, reason):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(CliError) as caught:
        load_chat(tmp_path / name)
    problem = caught.value.problems[0]
    assert reason in (problem.why or "")
    assert name in problem.what


def test_a_missing_file(tmp_path):
    with pytest.raises(CliError, match="cannot be read"):
        load_chat(tmp_path / "a.json")


def test_a_torn_last_line_is_left_out(tmp_path):
    save_chat(CHAT, tmp_path / "a.jsonl")
    with (tmp_path / "a.jsonl").open("ab") as file:
        file.write(b'{"role":"user","conte')
    assert load_chat(tmp_path / "a.jsonl") == CHAT


def test_a_last_line_without_its_end_counts_and_is_ended_by_who_goes_on(tmp_path):
    path = tmp_path / "a.jsonl"
    save_chat(CHAT, path)
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    assert load_chat(path) == CHAT
    log = TranscriptFile(path, resume=True)
    log.update(replace(CHAT, transcript=CHAT.transcript.with_system(None)))
    log.close()
    assert load_chat(path).transcript == CHAT.transcript.with_system(None)


def test_a_place_is_that_of_an_editor(tmp_path):
    (tmp_path / "a.jsonl").write_text(f"\n{HEADER}\nx\n{HEADER}")
    with pytest.raises(CliError, match=r"a\.jsonl:4 is no saved chat"):
        load_chat(tmp_path / "a.jsonl")


def test_json_lines_of_another_name_are_read(tmp_path):
    TranscriptFile(tmp_path / "a.json", resume=False).update(CHAT)
    assert load_chat(tmp_path / "a.json") == CHAT


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null", "."])
def test_what_is_no_file_ends_with_a_reason(path):
    with pytest.raises(CliError, match=r"is no saved chat|cannot be read"):
        load_chat(Path(path))


def test_a_chat_of_many_messages_is_read_in_one_pass(tmp_path):
    turn = b'{"role":"user","content":"q"}\n{"role":"assistant","content":"a"}\n'
    (tmp_path / "a.jsonl").write_bytes(HEADER.encode() + turn * 50_000)
    assert load_chat(tmp_path / "a.jsonl").transcript.num_turns == 50_000


def test_settings_that_no_turn_could_use_are_refused(chat):
    def file(**settings):
        document = {"schema_version": 1, "kind": "chat", "settings": settings, "messages": []}
        (chat.home / "a.json").write_text(json.dumps(document))

    with chat.talk() as talk:
        for settings in ({"seed": 2**70}, {"top_k": "x"}, {"colour": 1}, {"think": 1}):
            file(**settings)
            assert talk.ask("/load a.json").startswith("error: a.json: "), settings
        assert talk.ask("echo one").startswith("one\n")


def test_names_in_commands(chat):
    with chat.talk("--transcript", "t.jsonl") as talk:
        talk.ask("echo one")
        assert talk.ask("/save t.jsonl").startswith("error: t.jsonl is the transcript of this chat")
        assert talk.ask("/save ~nobody-of-that-name/a.json").startswith("error: ~nobody")
        assert talk.ask("/load ~nobody-of-that-name/a.json").startswith("error: ~nobody")
        assert talk.ask("/system @~nobody-of-that-name/a.txt").startswith("error: /system @~nobody")
        talk.ask("echo two")
    assert load_chat(chat.home / "t.jsonl").transcript.num_turns == 2
