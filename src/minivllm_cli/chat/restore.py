"""Going on with a saved chat: its transcript and settings, and what differs from the command line."""

from dataclasses import replace
from typing import Any

from minivllm_cli.chat.prompts import way_to_keep_thinking
from minivllm_cli.chat.saved_chat import SavedChat
from minivllm_cli.chat.session import SAMPLING_KEYS, Chat
from minivllm_cli.config.schema import check_value
from minivllm_cli.config.yaml import dump_value
from minivllm_cli.errors import CliError
from minivllm_engine.core.errors import RequestError
from minivllm_engine.core.sampling_params import SamplingParams
from minivllm_engine.text.chat_template import switches_thinking


def restore(chat: Chat, saved: SavedChat, name: str, *, flags_win: bool) -> list[str]:
    """Make `chat` what `saved` holds. Return what the user should know.

    Args:
        name: of the file.
        flags_win: a flag that was typed beats the file (at the start), instead of the reverse
            (`/load` is the later word).

    Raises:
        CliError: a setting in the file is no such setting, or out of range. Nothing has changed then.
    """
    values = check_saved_settings(saved, name)
    chat.template.check_system(saved.transcript.system)
    notes = _model_notes(chat, saved)
    flags = {
        path: entry for path, entry in chat.started_with.entries.items() if _is_flag(entry.source)
    }
    for key in SAMPLING_KEYS:
        entry = chat.settings.entries.get(f"sampling.{key}")
        if entry is not None and entry.source.startswith("/"):
            chat.put(key, None, "")
    for key, value in values.items():
        flag = flags.get(f"sampling.{key}")
        if flag is not None and flag.value != value:
            notes.append(_conflict(key, value, flag.value, flag.source, name, flags_win))
        if flag is None or not flags_win:
            chat.put(key, value, f"/load {name}")
    notes += _restore_thinking(chat, saved, name, flags_win)
    notes += _restore_transcript(chat, saved, name, flags_win)
    return notes


def check_saved_settings(saved: SavedChat, name: str) -> dict[str, Any]:
    """Return the sampling settings of a saved chat.

    Raises:
        CliError: one of its settings is no such setting, or out of range.
    """
    values: dict[str, Any] = {}
    for key, raw in saved.settings.items():
        if key in ("think", "think_keep"):
            if not isinstance(raw, bool | None):
                raise CliError(f"{name}: settings.{key}: write true or false, not {raw!r}")
            continue
        if key not in SAMPLING_KEYS:
            raise CliError(f"{name}: unknown setting {key}")
        value, wrong = check_value(f"sampling.{key}", raw)
        if wrong:
            raise CliError(f"{name}: settings.{key}: {wrong}, not {raw!r}")
        if value is not None:
            values[key] = value
    try:
        SamplingParams.create(**values)
    except RequestError as error:
        raise CliError(f"{name}: settings.{error.what}", why=error.why) from None
    return values


def _model_notes(chat: Chat, saved: SavedChat) -> list[str]:
    if not saved.model or saved.model.get("hash") == chat.model.get("hash"):
        return []
    return [f"saved with model {saved.model.get('name')}; this is {chat.model.get('name')}"]


def _restore_thinking(chat: Chat, saved: SavedChat, name: str, flags_win: bool) -> list[str]:
    notes: list[str] = []
    think = saved.settings.get("think")
    flag = chat.started_with.entries.get("chat.think")
    typed = flag is not None and _is_flag(flag.source)
    if typed and flag is not None and flag.value != think:
        notes.append(_conflict("think", think, flag.value, flag.source, name, flags_win))
    if think is not None and not switches_thinking(chat.llm.tokenizer):
        notes.append(f"think {dump_value(think)}: this model's template has no such switch")
    elif not (typed and flags_win):
        chat.think = think
    chat.thinking_in_history, chat.keep_kwargs = "drop", {}
    if saved.settings.get("think_keep"):
        way = way_to_keep_thinking(chat.llm.tokenizer)
        if way is None:
            notes.append("think keep: this model's template drops earlier thinking")
        else:
            chat.thinking_in_history, chat.keep_kwargs = way
    return notes


def _restore_transcript(chat: Chat, saved: SavedChat, name: str, flags_win: bool) -> list[str]:
    notes: list[str] = []
    transcript = saved.transcript
    if transcript.messages and transcript.messages[-1].role == "user":
        transcript = replace(transcript, messages=transcript.messages[:-1])
        notes.append("the last question has no answer and was left out")
    flag = chat.started_with.entries.get("chat.system")
    if flag is not None and _is_flag(flag.source) and flag.value != transcript.system:
        winner = flag.source if flags_win else name
        notes.append(f"system text: that of {winner}, which differs from the other")
        if flags_win:
            transcript = transcript.with_system(flag.value)
    chat.transcript = chat.saved = transcript
    return notes


def _conflict(key: str, in_file: Any, in_flag: Any, flag: str, name: str, flags_win: bool) -> str:
    if flags_win:
        return f"{key} {dump_value(in_flag)} ({flag}; {name} has {dump_value(in_file)})"
    return f"{key} {dump_value(in_file)} ({name}; {flag} said {dump_value(in_flag)})"


def _is_flag(source: str) -> bool:
    return source.startswith("--")
