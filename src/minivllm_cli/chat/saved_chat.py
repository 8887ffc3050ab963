"""The saved form of a chat: JSON, JSON lines, and Markdown for people.

JSON lines are a header, then one message a line. A transcript that is written as the chat goes on
also holds `event` lines, which change what stands before them:

    {"event": "truncate", "messages": 4}     the first 4 messages remain, the system text not counted
    {"event": "system", "content": "..."}    another system text, or null
    {"event": "settings", "settings": {...}}
"""

import fcntl
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from minivllm_cli.chat.transcript import Message, Transcript
from minivllm_cli.config.yaml import dump_value
from minivllm_cli.errors import CliError
from minivllm_cli.files.atomic_file import write_atomic
from minivllm_engine.protocol.strict_json import BadJson, dump_line, encode_text, parse_object

SCHEMA_VERSION = 1
WRITABLE = (".json", ".jsonl", ".md")
_MOST_BYTES = 1 << 24  # far more than the text of any context
_T = TypeVar("_T")
_KINDS: Mapping[type, str] = {
    dict: "JSON object",
    str: "text",
    int: "whole number",
    bool: "true or false",
}


@dataclass(frozen=True, slots=True)
class SavedChat:
    """A chat with what is needed to go on with it.

    Attributes:
        model: `name` and `hash` of the model that answered.
        settings: sampling keys, `think` and `think_keep`, as far as they were set.
    """

    model: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    transcript: Transcript = Transcript()


def message_row(message: Message) -> dict[str, Any]:
    """Return a message as a JSON object."""
    row: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.role == "assistant":
        row["reasoning"] = message.reasoning
        row["interrupted"] = message.interrupted
        row["finish_reason"] = message.finish_reason
        row["stats"] = dict(message.stats)
    return row


def header_row(chat: SavedChat) -> dict[str, Any]:
    """Return what a file says before its messages."""
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "chat",
        "model": dict(chat.model),
        "settings": dict(chat.settings),
    }


def message_rows(transcript: Transcript) -> list[dict[str, Any]]:
    """Return all messages as JSON objects, the system text as the first."""
    rows = [message_row(message) for message in transcript.messages]
    if transcript.system is not None:
        rows.insert(0, {"role": "system", "content": transcript.system})
    return rows


def save_chat(chat: SavedChat, path: Path) -> None:
    """Write `chat` in the form that the name's ending asks for, whole or not at all.

    Raises:
        CliError: another ending, or the file cannot be written.
    """
    ending = path.suffix.lower()
    if ending == ".json":
        document = header_row(chat) | {"messages": message_rows(chat.transcript)}
        text = json.dumps(document, ensure_ascii=False, allow_nan=False, indent=1)
        data = encode_text(text) + b"\n"
    elif ending == ".jsonl":
        rows = [header_row(chat), *message_rows(chat.transcript)]
        data = b"".join(dump_line(row) for row in rows)
    elif ending == ".md":
        data = encode_text(_markdown(chat))
    else:
        raise CliError(
            f"{path}: cannot tell the form from the name", hint=f"a name in {', '.join(WRITABLE)}"
        )
    try:
        write_atomic(path, data)
    except OSError as error:
        raise CliError(f"{path} cannot be written", why=error.strerror or str(error)) from None


def load_chat(path: Path) -> SavedChat:
    """Read what `save_chat` or a transcript wrote, whatever its name. A torn last line is left out.

    Raises:
        CliError: the file cannot be read, or is no saved chat.
    """
    if path.suffix.lower() == ".md":
        raise CliError(f"{path} is for reading only", hint="load the .json or .jsonl of that chat")
    try:
        with open(path, "rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise CliError(f"{path} cannot be read", why=why) from None
    return load_bytes(data, str(path))[0]


def load_bytes(data: bytes, source: str) -> tuple[SavedChat, int]:
    """Return the chat in a JSON document or in JSON lines, and how many bytes of it are whole lines.

    Raises:
        CliError: it is too long, a line other than the last is broken, or it is no saved chat.
    """
    if len(data) > _MOST_BYTES:
        _refuse(source, f"it has more than {_MOST_BYTES:,} bytes")
    begin, newline, _ = data.partition(b"\n")
    is_lines = source.lower().endswith(".jsonl")
    with suppress(CliError):  # a document goes over several lines
        is_lines = "messages" not in _parse(begin, source) and (is_lines or bool(newline))
    if is_lines:
        return _load_lines(data, source)
    document = _parse(data, source)
    if not isinstance(document.get("messages"), list):
        _refuse(source, "it has no list `messages`")
    return _replay(document, document["messages"], source), len(data)


def _load_lines(data: bytes, source: str) -> tuple[SavedChat, int]:
    whole, rows = len(data), []
    lines = data.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(_parse(line, f"{source}:{number}"))
        except CliError:
            if number < len(lines) or not rows:
                raise
            whole -= len(line)
    if not rows:
        _refuse(source, "it is empty")
    return _replay(rows[0], rows[1:], source), whole


def _replay(header: dict[str, Any], rows: Iterable[Any], source: str) -> SavedChat:
    if header.get("kind") != "chat":
        _refuse(source, f"kind is {header.get('kind')!r}")
    if header.get("schema_version") != SCHEMA_VERSION:
        version = header.get("schema_version")
        _refuse(source, f"schema_version is {version!r}, this version reads {SCHEMA_VERSION}")
    model, settings = (_field(header, key, dict, source) or {} for key in ("model", "settings"))
    system: str | None = None
    messages: list[Message] = []
    for number, row in enumerate(rows, start=1):
        place = f"{source}: message {number}"
        if not isinstance(row, dict):
            _refuse(place, "it is no JSON object")
        event = row.get("event")
        if event == "truncate":
            kept = _field(row, "messages", int, place)
            if kept is None or not 0 <= kept <= len(messages):
                _refuse(place, f"it cannot keep {kept!r} of {len(messages)} messages")
            del messages[kept:]
        elif event == "system":
            system = _field(row, "content", str, place)
        elif event == "settings":
            settings = _field(row, "settings", dict, place) or {}
        elif event is not None:
            _refuse(place, f"unknown event {event!r}")
        elif row.get("role") == "system":
            if system is not None or messages:
                _refuse(place, "a system text can only come first")
            system = _message(row, place).content
        else:
            messages.append(_message(row, place, messages[-1] if messages else None))
    return SavedChat(model, settings, Transcript(system, tuple(messages)))


def _message(row: dict[str, Any], source: str, before: Message | None = None) -> Message:
    role, content = row.get("role"), row.get("content")
    if not isinstance(content, str):
        _refuse(source, "its content is no text")
    if role == "system":
        return Message("user", content)
    if role not in ("user", "assistant"):
        _refuse(source, f"role is {role!r}, not system, user or assistant")
    if (role == "assistant") != (before is not None and before.role == "user"):
        _refuse(source, "questions and answers are not in turn")
    if role == "user":
        return Message("user", content)
    stats = _field(row, "stats", dict, source) or {}
    return Message(
        "assistant",
        content,
        reasoning=_field(row, "reasoning", str, source),
        interrupted=_field(row, "interrupted", bool, source) or False,
        finish_reason=_field(row, "finish_reason", str, source),
        stats={k: v for k, v in stats.items() if isinstance(v, int | float | str | None)},
    )


def _parse(data: bytes, source: str) -> dict[str, Any]:
    try:
        return parse_object(data.decode("utf-8-sig"))
    except BadJson as error:
        _refuse(source, error.message)
    except UnicodeDecodeError:
        _refuse(source, "it is not UTF-8")


def _field(row: Mapping[str, Any], key: str, kind: type[_T], source: str) -> _T | None:
    value = row.get(key)
    if value is None or (isinstance(value, kind) and (kind is bool or not isinstance(value, bool))):
        return value
    _refuse(source, f"{key} is no {_KINDS[kind]}")


def _refuse(source: str, why: str) -> NoReturn:
    raise CliError(f"{source} is no saved chat", why=why)


def _markdown(chat: SavedChat) -> str:
    name = str(chat.model.get("name", "assistant"))
    set_ones = {key: value for key, value in chat.settings.items() if value not in (None, False)}
    settings = " · ".join(f"{key} {dump_value(value)}" for key, value in set_ones.items())
    parts = [f"# Chat with {name}"]
    if settings:
        parts.append(settings)
    if chat.transcript.system is not None:
        parts += ["## System", chat.transcript.system]
    for message in chat.transcript.messages:
        parts.append("## You" if message.role == "user" else f"## {name}")
        if message.reasoning:
            parts.append("\n".join(f"> {line}" for line in message.reasoning.strip().split("\n")))
        mark = "\n\n*[interrupted]*" if message.interrupted else ""
        parts.append(message.content.strip("\n") + mark)
    return "\n\n".join(parts) + "\n"


class TranscriptFile:
    """Owns a transcript that grows with the chat, so that even a kill loses no finished turn.

    The file only ever grows: what is undone stays readable, followed by an event that takes it back.

    Raises:
        CliError (constructor): the file exists and `resume` is not set, another chat writes to it,
            it is no saved chat, or it cannot be opened.
    """

    def __init__(self, path: Path, *, resume: bool) -> None:
        self.path = path
        self._written: SavedChat | None = None
        self._is_ours = not path.exists()
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        except OSError as error:
            raise CliError(f"{path} cannot be opened", why=error.strerror or str(error)) from None
        try:
            self._lock_and_read(resume)
        except BaseException:
            os.close(self._descriptor)
            raise

    def _lock_and_read(self, resume: bool) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CliError(f"another chat writes to {self.path}", hint="another name") from None
        size = os.fstat(self._descriptor).st_size
        if size and not resume:
            raise CliError(f"{self.path} exists", hint="--resume to go on with it, or another name")
        if size:
            data = os.pread(self._descriptor, _MOST_BYTES + 1, 0)
            self._written, whole = load_bytes(data, str(self.path))
            os.ftruncate(self._descriptor, whole)
            if data[whole - 1 : whole] != b"\n":
                _write_all(self._descriptor, b"\n")

    @property
    def resumed(self) -> SavedChat | None:
        """Return the chat that the file holds so far, or if the file is new."""
        return self._written

    def update(self, chat: SavedChat) -> None:
        """Append what turns the chat in the file into `chat`; nothing where they are equal.

        Raises:
            CliError: the file cannot be written. The next update tries again.
        """
        data = b"".join(dump_line(row) for row in _difference(self._written, chat))
        size = os.fstat(self._descriptor).st_size
        try:
            _write_all(self._descriptor, data)
        except OSError as error:
            with suppress(OSError):  # a FIFO or a device has no size
                os.ftruncate(self._descriptor, size)
            raise CliError(
                f"{self.path} cannot be written", why=error.strerror or str(error)
            ) from None
        self._written = chat

    def close(self) -> None:
        """Let go of the file. One that we made and never wrote to is removed."""
        if self._is_ours and self._written is None:
            self.path.unlink(missing_ok=True)
        os.close(self._descriptor)


def _difference(old: SavedChat | None, new: SavedChat) -> list[dict[str, Any]]:
    if old is None:
        return [header_row(new), *message_rows(new.transcript)]
    rows: list[dict[str, Any]] = []
    if old.settings != new.settings:
        rows.append({"event": "settings", "settings": dict(new.settings)})
    common = old.transcript.num_common(new.transcript)
    if common < len(old.transcript.messages):
        rows.append({"event": "truncate", "messages": common})
    if old.transcript.system != new.transcript.system:
        rows.append({"event": "system", "content": new.transcript.system})
    return rows + [message_row(message) for message in new.transcript.messages[common:]]


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
