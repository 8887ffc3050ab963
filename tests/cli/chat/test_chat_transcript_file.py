"""The transcript that grows with the chat: whatever happened to the chat, the file says the same."""

import json
from dataclasses import replace

import pytest

from minivllm_cli.chat.saved_chat import SavedChat, TranscriptFile, load_chat
from minivllm_cli.chat.transcript import Message, Transcript
from minivllm_cli.errors import CliError

START = SavedChat({"name": "demo", "hash": "sha256:00"}, {"seed": 1}, Transcript("Be brief."))


def _turn(chat: SavedChat, question: str, answer: str) -> SavedChat:
    transcript = chat.transcript.asked(question).answered(Message("assistant", answer))
    return replace(chat, transcript=transcript)


def test_every_change_of_a_chat_can_be_read_back(tmp_path):
    path = tmp_path / "t.jsonl"
    log = TranscriptFile(path, resume=False)
    one = _turn(START, "q1", "a1")
    two = _turn(one, "q2", "a2")
    states = [
        START,
        one,
        two,
        one,
        _turn(one, "q2", "another"),
        replace(one, transcript=one.transcript.with_system(None)),
        replace(one, settings={"seed": 2, "temperature": 0.5}),
        replace(START, transcript=START.transcript.cleared()),
        two,
    ]
    size = 0
    for state in states:
        log.update(state)
        assert load_chat(path) == state
        assert path.stat().st_size >= size, "the file only grows"
        size = path.stat().st_size
    log.update(two)
    assert path.stat().st_size == size
    log.close()
    assert path.read_bytes().count(b'"q2"') == 3, "undone turns stay readable"


def test_a_turn_is_appended_as_two_lines(tmp_path):
    log = TranscriptFile(tmp_path / "t.jsonl", resume=False)
    log.update(START)
    before = (tmp_path / "t.jsonl").read_bytes()
    log.update(_turn(START, "q", "a"))
    added = (tmp_path / "t.jsonl").read_bytes()[len(before) :]
    assert [json.loads(line)["role"] for line in added.splitlines()] == ["user", "assistant"]
    log.close()


def test_resuming_goes_on_after_a_torn_line(tmp_path):
    path = tmp_path / "t.jsonl"
    log = TranscriptFile(path, resume=False)
    log.update(_turn(START, "q", "a"))
    log.close()
    with path.open("ab") as file:
        file.write(b'{"role":"assist')
    log = TranscriptFile(path, resume=True)
    assert log.resumed == _turn(START, "q", "a")
    later = _turn(log.resumed, "q2", "a2")
    log.update(later)
    log.close()
    assert load_chat(path) == later


def test_an_existing_file_is_not_touched_without_resume(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("precious")
    with pytest.raises(CliError, match="exists"):
        TranscriptFile(path, resume=False)
    assert path.read_text() == "precious"


def test_resume_without_a_file_begins_one(tmp_path):
    log = TranscriptFile(tmp_path / "t.jsonl", resume=True)
    assert log.resumed is None
    log.update(START)
    log.close()
    assert load_chat(tmp_path / "t.jsonl") == START


def test_a_file_that_was_never_written_to_is_removed(tmp_path):
    TranscriptFile(tmp_path / "t.jsonl", resume=False).close()
    assert not (tmp_path / "t.jsonl").exists()


def test_a_second_chat_on_the_same_file_is_refused(tmp_path):
    log = TranscriptFile(tmp_path / "t.jsonl", resume=False)
    log.update(START)
    with pytest.raises(CliError, match="another chat writes"):
        TranscriptFile(tmp_path / "t.jsonl", resume=True)
    log.close()


def test_a_directory_is_refused(tmp_path):
    with pytest.raises(CliError, match="cannot be opened"):
        TranscriptFile(tmp_path, resume=False)
