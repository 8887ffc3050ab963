"""The slash commands: one table, from which come dispatch, help and completion."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minivllm_cli.chat import settings_commands, show_commands, turn_commands
from minivllm_cli.chat.repl import Repl
from minivllm_cli.chat.session import SAMPLING_KEYS
from minivllm_cli.errors import CliError
from minivllm_engine.core.suggest import suggest


@dataclass(frozen=True, slots=True)
class Command:
    """One slash command.

    Attributes:
        usage: what may follow the name, for people; empty where nothing may.
        run: called with the REPL and the rest of the line. Raises CliError for a wrong argument.
        choices: words that may follow the name, each with a line of help.
        takes_path: a file name may follow.
    """

    name: str
    usage: str
    help: str
    run: Callable[[Repl, str], None]
    choices: tuple[tuple[str, str], ...] = ()
    takes_path: bool = False


def _help(repl: Repl, argument: str) -> None:
    rows = [(f"{command.name} {command.usage}".rstrip(), command.help) for command in COMMANDS]
    history = repl.history.path if repl.history is not None else "off (--no-history)"
    rows += [*_KEYS, ("history file", str(history))]
    width = max(len(left) for left, _ in rows)
    lines = [f"{left:<{width}}  {right}" for left, right in rows]
    repl.screen.print("\n".join(lines), indent=width + 2)


def _exit(repl: Repl, argument: str) -> None:
    raise EOFError  # as Ctrl-D


_KEYS = [
    ("Enter", "send"),
    ('"""', "begins and ends a block of lines in which Enter breaks the line"),
    ("Alt-Enter, Ctrl-J", "a line break"),
    (
        "Ctrl-C",
        "stop an answer, drop lines typed ahead, clear the line, end an edit; twice when empty: leave",
    ),
    ("Ctrl-D", "leave, or end an edit"),
    ("Ctrl-R", "search what was typed"),
    ("Ctrl-X Ctrl-E", "edit in $EDITOR"),
    ("//x", "say /x"),
]

COMMANDS: tuple[Command, ...] = (
    Command("/help", "", "this list", _help),
    Command("/clear", "", "start anew; system text and settings stay", turn_commands.clear),
    Command("/undo", "[N]", "drop the last turn, or N turns", turn_commands.undo),
    Command("/regen", "[SEED]", "answer the last question again", turn_commands.regen),
    Command("/edit", "", "edit the last question and ask it again", turn_commands.edit),
    Command("/edit-reply", "", "edit the last answer", turn_commands.edit_reply),
    Command("/continue", "", "extend the last answer", turn_commands.extend),
    Command("/fork", "[NAME]", "put this chat aside as a branch and go on", turn_commands.fork),
    Command("/branches", "[NAME]", "list the branches, or go on from one", turn_commands.branches),
    Command(
        "/system",
        "[TEXT]",
        "replace the system text; @FILE reads it, - removes it",
        settings_commands.system,
        takes_path=True,
    ),
    Command(
        "/set",
        "[KEY VALUE]",
        "set a sampling key; null takes it back",
        settings_commands.set_key,
        choices=tuple((key, "sampling key") for key in SAMPLING_KEYS),
    ),
    Command("/seed", "[N]", "set the seed", settings_commands.seed),
    Command(
        "/think",
        "[WORD]",
        "thinking: on, off, show, fold, hide, keep, drop",
        settings_commands.think,
        choices=settings_commands.THINK_CHOICES,
    ),
    Command(
        "/stats",
        "[on|off]",
        "the line after each answer; alone: what the chat has cost",
        settings_commands.stats,
        choices=(("on", "show it"), ("off", "do not")),
    ),
    Command("/multi", "", "swap the keys Enter and Alt-Enter", settings_commands.multi),
    Command(
        "/show",
        "[TOPIC]",
        ", ".join(show_commands.TOPICS),
        show_commands.show,
        choices=tuple((name, text) for name, (text, _) in show_commands.TOPICS.items()),
    ),
    Command("/cache", "", "KV blocks, state slots, snapshots, reuse", show_commands.cache),
    Command("/why", "", "why the last answer reused no more", show_commands.why),
    Command("/tokens", "", "what takes room in the context", show_commands.tokens),
    Command(
        "/save",
        "FILE",
        "write this chat to a .json, .jsonl or .md file",
        turn_commands.save,
        takes_path=True,
    ),
    Command(
        "/load",
        "FILE",
        "go on with a saved chat and its settings",
        turn_commands.load,
        takes_path=True,
    ),
    Command(
        "/history",
        "[clear]",
        "where typed texts are kept; clear forgets them",
        settings_commands.history,
        choices=(("clear", "empty the history file"),),
    ),
    Command("/exit", "", "leave (also /quit, /bye, exit, quit)", _exit),
)
_BY_NAME = {command.name: command for command in COMMANDS}
_BY_NAME |= dict.fromkeys(("/quit", "/bye"), _BY_NAME["/exit"])


def run_command(repl: Repl, name: str, argument: str) -> None:
    """Run the command of exactly that name.

    Raises:
        CliError: there is none, and it names the nearest; or the argument will not do.
        EngineError: what it asks of the engine is refused.
        EOFError: the user leaves.
    """
    command = _BY_NAME.get(name)
    if command is None:
        topic = f"/show {name[1:]}" if name[1:] in show_commands.TOPICS else None
        near = topic or suggest(name.lower(), _BY_NAME) or "/help"
        raise CliError(
            f"unknown command {name}",
            why="nothing was sent",
            hint=f"{near}, or /{name} to say it to the model",
        )
    if argument and not command.usage:
        raise CliError(f"{name} takes no argument, not {argument!r}")
    command.run(repl, argument)


def complete(line: str) -> Sequence[tuple[str, str]] | None:
    """Tell what may stand at the end of `line`: (word, help) pairs; None for a file name."""
    name, blank, rest = line.partition(" ")
    if not blank:
        return [(command.name, command.help) for command in COMMANDS]
    command = _BY_NAME.get(name)
    if command is None or " " in rest:
        return []
    return None if command.takes_path else command.choices
