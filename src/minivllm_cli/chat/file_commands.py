"""Commands that read and write files."""

from pathlib import Path
from typing import TYPE_CHECKING

from minivllm_cli.chat.restore import restore
from minivllm_cli.chat.saved_chat import WRITABLE, load_chat, save_chat
from minivllm_cli.chat.turn_commands import so_far_is_kept, turns
from minivllm_cli.errors import CliError

if TYPE_CHECKING:
    from minivllm_cli.chat.repl import Repl


def save(repl: "Repl", argument: str) -> None:
    """`/save FILE`"""
    if not argument:
        raise CliError("/save needs a file name", hint="/save chat.json")
    path = Path(argument).expanduser()
    known = path.suffix.lower() in WRITABLE  # otherwise save_chat says what is wrong
    if known and path.exists() and not repl.prompt.confirm(f"{path} exists. Overwrite it?"):
        repl.screen.console.note("not saved")
        return
    chat = repl.chat
    save_chat(chat.saved_form(), path)
    chat.saved = chat.transcript
    repl.screen.print(f"saved {turns(chat.transcript.num_turns)} to {path}")


def load(repl: "Repl", argument: str) -> None:
    """`/load FILE`"""
    if not argument:
        raise CliError("/load needs a file name", hint="/load chat.json")
    path = Path(argument).expanduser()
    chat, saved = repl.chat, load_chat(path)
    left = chat.transcript
    notes = restore(chat, saved, str(path), flags_win=False)
    lines = [f"loaded {turns(chat.transcript.num_turns)} from {path}", *notes]
    if left != chat.transcript:
        lines += so_far_is_kept(repl.branches.keep_safe(left, "before-load"))
    repl.screen.print("\n".join(lines))


def clear_history(repl: "Repl", argument: str) -> None:
    """`/history clear`"""
    if argument != "clear":
        raise CliError(
            f"/history {argument}".rstrip() + ": what to do with it?", hint="/history clear"
        )
    if repl.history is None:
        raise CliError("there is no history: --no-history")
    try:
        repl.history.clear()
    except OSError as error:
        raise CliError(f"{repl.history.path} cannot be written", why=error.strerror) from None
    repl.prompt.forget()
    repl.screen.print(f"{repl.history.path} is empty now")
