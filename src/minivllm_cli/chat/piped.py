"""`chat` with a pipe or a file on stdin: one question, one answer, and the end."""

import sys

from minivllm_cli.chat.screen import AnswerView, Screen
from minivllm_cli.chat.session import Chat, StopFlag
from minivllm_cli.command import Invocation
from minivllm_cli.console.streams import claim_stdout
from minivllm_cli.errors import CliError, ExitCode, problems_of
from minivllm_engine.core.errors import EngineError

_MOST_BYTES = 1 << 26


def read_question() -> str:
    """Read all of stdin as one message.

    Raises:
        CliError: there is nothing in it, or it is not UTF-8.
    """
    data = sys.stdin.buffer.read(_MOST_BYTES + 1) if sys.stdin is not None else b""
    if len(data) > _MOST_BYTES:
        raise CliError(f"stdin has more than {_MOST_BYTES:,} bytes: no context is so long")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CliError(
            f"stdin is not UTF-8 (byte 0x{data[error.start]:02x} at {error.start:,})"
        ) from None
    if not text.strip():
        raise CliError(
            "stdin is empty: there is no message", hint='echo "Define aardvark." | minivllm chat'
        )
    return text.strip("\r\n")


def answer_once(run: Invocation, chat: Chat, question: str) -> ExitCode:
    """Stream the answer to stdout, without its thinking.

    Raises:
        CliError: the transcript cannot be written, or stdout.
        KeyboardInterrupt: it was stopped. What had come by then is in the transcript file.
    """
    stop, interrupts = StopFlag(), run.interrupts
    stats = chat.settings.chat.stats
    screen = Screen(claim_stdout(), run.console, thinking="hide", stats=stats, colour=False)

    def on_signal(count: int) -> None:
        if stop.requested:
            raise KeyboardInterrupt
        screen.console.write_line("stopping. Ctrl-C again to leave at once.")
        interrupts.limit_clean_up()
        stop.request()

    view = AnswerView(screen)
    with interrupts.stopping_with(on_signal):
        try:
            output = chat.ask(chat.transcript, question, view, stop)
        except EngineError as error:
            view.end()
            for problem in problems_of(error):
                screen.console.error(problem)
            return ExitCode.SOME_REQUESTS_FAILED
        except CliError:
            raise
        except Exception as error:
            view.end()
            chat.attach_to(error)
            raise
        view.end(interrupted=stop.requested)
        chat.write_log()
    if stop.requested:
        raise KeyboardInterrupt
    screen.after_answer(output, chat.llm.max_model_len)
    return ExitCode.OK
