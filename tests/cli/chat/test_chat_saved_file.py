"""Saved chats: three forms out, two back in, and files that are none."""

import json
import os
import stat

import pytest

from minivllm_cli.chat.saved_chat import SavedChat, load_chat, save_chat
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
