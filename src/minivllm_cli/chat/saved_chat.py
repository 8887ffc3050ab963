"""The saved form of a chat: JSON, JSON lines, and Markdown for people.

JSON lines are a header, then one message a line. A transcript that is written as the chat goes on
(transcript_file.py) also holds `event` lines, which change what stands before them:

    {"event": "truncate", "messages": 4}     the first 4 messages remain, the system text not counted
    {"event": "system", "content": "..."}    another system text, or null
    {"event": "settings", "settings": {...}}
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from minivllm_cli.chat.transcript import Message, Transcript
from minivllm_cli.config.yaml import dump_value
from minivllm_cli.errors import CliError
from minivllm_engine.core.atomic_file import write_atomic
from minivllm_engine.protocol.strict_json import BadJson, dump_line, encode_text, parse_object

SCHEMA_VERSION = 1
WRITABLE = (".json", ".jsonl", ".md")


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
    """A message as a JSON object."""
    row: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.role == "assistant":
        row["reasoning"] = message.reasoning
        row["interrupted"] = message.interrupted
        row["finish_reason"] = message.finish_reason
        row["stats"] = dict(message.stats)
    return row


def header_row(chat: SavedChat) -> dict[str, Any]:
    """What a file says before its messages."""
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "chat",
        "model": dict(chat.model),
        "settings": dict(chat.settings),
    }


def message_rows(transcript: Transcript) -> list[dict[str, Any]]:
    """All messages as JSON objects, the system text as the first."""
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
    """Read what `save_chat` or a transcript wrote. A torn last line of a `.jsonl` is left out.

    Raises:
        CliError: the file cannot be read, or is no saved chat.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CliError(f"{path} cannot be read", why=error.strerror or str(error)) from None
    if path.suffix.lower() == ".md":
        raise CliError(f"{path} is for reading only", hint="load the .json or .jsonl of that chat")
    if path.suffix.lower() == ".jsonl":
        return load_lines(data, str(path))[0]
    document = _parse(data, str(path))
    if not isinstance(document.get("messages"), list):
        _refuse(str(path), "it has no list `messages`")
    return _replay([document, *document["messages"]], str(path))


def load_lines(data: bytes, source: str) -> tuple[SavedChat, int]:
    """The chat in a JSON lines file, and how many bytes of the file are whole lines.

    Raises:
        CliError: a line other than the last is broken, or it is no saved chat.
    """
    whole = data[: data.rfind(b"\n") + 1]
    lines = [line for line in whole.split(b"\n") if line.strip()]
    rows = [_parse(line, f"{source}:{number}") for number, line in enumerate(lines, start=1)]
    if not rows:
        _refuse(source, "it is empty")
    return _replay(rows, source), len(whole)


def _replay(rows: Iterable[Any], source: str) -> SavedChat:
    header, *rest = rows
    if header.get("kind") != "chat":
        _refuse(source, f"kind is {header.get('kind')!r}")
    if header.get("schema_version") != SCHEMA_VERSION:
        version = header.get("schema_version")
        _refuse(source, f"schema_version is {version!r}, this version reads {SCHEMA_VERSION}")
    chat = SavedChat(_mapping(header, "model", source), _mapping(header, "settings", source))
    for number, row in enumerate(rest, start=1):
        chat = _with_row(chat, row, f"{source}: message {number}")
    return chat


def _with_row(chat: SavedChat, row: Any, source: str) -> SavedChat:
    if not isinstance(row, dict):
        _refuse(source, "it is no JSON object")
    transcript = chat.transcript
    match row.get("event"):
        case None:
            return replace(chat, transcript=_with_message(transcript, row, source))
        case "truncate" if isinstance(row.get("messages"), int):
            kept = transcript.messages[: row["messages"]]
            return replace(chat, transcript=replace(transcript, messages=kept))
        case "system" if isinstance(row.get("content"), str | None):
            return replace(chat, transcript=transcript.with_system(row["content"]))
        case "settings":
            return replace(chat, settings=_mapping(row, "settings", source))
    _refuse(source, f"unknown event {row['event']!r}")


def _with_message(transcript: Transcript, row: dict[str, Any], source: str) -> Transcript:
    role, content = row.get("role"), row.get("content")
    if not isinstance(content, str):
        _refuse(source, "its content is no text")
    if role == "system":
        if transcript.system is not None or transcript.messages:
            _refuse(source, "a system text can only come first")
        return transcript.with_system(content)
    if role == "user":
        return transcript.asked(content)
    if role != "assistant":
        _refuse(source, f"role is {role!r}, not system, user or assistant")
    reasoning = row.get("reasoning")
    message = Message(
        "assistant",
        content,
        reasoning=reasoning if isinstance(reasoning, str) else None,
        interrupted=row.get("interrupted") is True,
        finish_reason=row.get("finish_reason"),
        stats=_mapping(row, "stats", source),
    )
    return replace(transcript, messages=(*transcript.messages, message))


def _parse(data: bytes, source: str) -> dict[str, Any]:
    try:
        return parse_object(data.decode("utf-8-sig"))
    except BadJson as error:
        _refuse(source, error.message)
    except UnicodeDecodeError:
        _refuse(source, "it is not UTF-8")


def _mapping(row: Mapping[str, Any], key: str, source: str) -> dict[str, Any]:
    value = row.get(key, {})
    if not isinstance(value, dict):
        _refuse(source, f"{key} is no JSON object")
    return value


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
