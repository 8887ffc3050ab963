"""What is shown, and kept for a report, when an answer fails."""

import json
import traceback

from minivllm_cli.chat.saved_chat import header_row, message_rows
from minivllm_cli.chat.session import Chat
from minivllm_cli.console.streams import Console
from minivllm_cli.diagnostics import write_crash_file
from minivllm_cli.errors import CliError, Problem, problems_of
from minivllm_engine.core.errors import EngineError


def engine_failure(error: Exception, chat: Chat, console: Console) -> list[Problem]:
    """The problems to show for what an answer raised. The turn has been rolled back.

    An error that nobody expected also leaves a crash file, which holds the transcript.
    """
    if console.debug:
        console.write("".join(traceback.format_exception(error)))
    if isinstance(error, CliError | EngineError):
        return problems_of(error)
    attach_transcript(error, chat)
    path = write_crash_file(error, "chat")
    message = " ".join(str(error).split()) or type(error).__name__
    return [
        Problem(
            f"engine failed: {message}",
            why=f"{type(error).__name__}; details and transcript are in {path}" if path else None,
            hint="ask again; if it fails again, /save the chat and restart",
        )
    ]


def attach_transcript(error: BaseException, chat: Chat) -> None:
    """Make the transcript a part of what a crash file will say of `error`."""
    saved = chat.saved_form()
    document = header_row(saved) | {"messages": message_rows(saved.transcript)}
    error.add_note("transcript: " + json.dumps(document, ensure_ascii=False))
