"""Commands that change the transcript: drop, answer again, edit, extend, branch, save, load."""

import os
import secrets
from dataclasses import replace
from pathlib import Path

from minivllm_cli.chat.parse_line import whole_number
from minivllm_cli.chat.prompt import PromptInterrupt
from minivllm_cli.chat.repl import Repl
from minivllm_cli.chat.restore import restore
from minivllm_cli.chat.saved_chat import WRITABLE, load_chat, save_chat
from minivllm_cli.chat.transcript import Transcript
from minivllm_cli.errors import CliError
from minivllm_engine.core.units import count_text


def clear(repl: Repl, argument: str) -> None:
    chat = repl.chat
    dropped = chat.transcript
    kept = repl.branches.keep_safe(dropped, "before-clear")
    chat.transcript = dropped.cleared()
    way_back = "" if kept is None else f"; /branches {kept} brings back what was said"
    repl.screen.print(f"cleared {_turns(dropped)}{way_back}")


def undo(repl: Repl, argument: str) -> None:
    chat = repl.chat
    count = whole_number("/undo", argument or "1", least=1)
    turns, there = count_text(count, "turn"), chat.transcript.num_turns
    if count > there:
        raise CliError(f"cannot undo {turns}: the chat has {there}")
    shorter = chat.transcript.without_turns(count)
    cost = chat.cost_of_history(shorter)
    chat.transcript = shorter
    repl.screen.print(f"undone {turns} ({cost})")


def regen(repl: Repl, argument: str) -> None:
    chat = repl.chat
    question = _last_question(chat.transcript)
    seed = whole_number("/regen", argument, least=0) if argument else secrets.randbelow(2**31)
    if chat.settings.resolved("sampling.temperature") == 0:
        repl.screen.console.note("temperature 0: every seed gives the same answer")
    elif not argument:
        repl.screen.console.dim(f"seed {seed}")
    history = chat.transcript.without_turns(1)
    repl.turn(lambda view, stop: chat.ask(history, question, view, stop, seed=seed))


def edit(repl: Repl, argument: str) -> None:
    chat = repl.chat
    edited = _read_edited(repl, _last_question(chat.transcript))
    if edited is None:
        return
    history = chat.transcript.without_turns(1)
    repl.turn(lambda view, stop: chat.ask(history, edited, view, stop))


def edit_reply(repl: Repl, argument: str) -> None:
    chat = repl.chat
    answer = chat.transcript.last_answer
    if answer is None:
        raise CliError("there is no answer to edit yet")
    edited = _read_edited(repl, answer.content)
    if edited is None:
        return
    other = chat.transcript.without_answer().answered(replace(answer, content=edited))
    cost = chat.cost_of_history(other)
    chat.transcript = other
    repl.screen.print(f"answer replaced ({cost}); /continue extends it")


def extend(repl: Repl, argument: str) -> None:
    answer = repl.chat.transcript.last_answer
    if answer is None:
        raise CliError("there is no answer to extend")
    if not answer.content:
        longer = "/set max_tokens N, then " if answer.finish_reason == "length" else ""
        raise CliError(
            "there is no answer to extend",
            why="it ended before its first word",
            hint=f"{longer}/regen",
        )
    repl.turn(repl.chat.extend)


def fork(repl: Repl, argument: str) -> None:
    name = argument or repl.branches.free_name("branch")
    if name in repl.branches:
        raise CliError(f"there is a branch {name} already", hint="another name")
    transcript = repl.chat.transcript
    repl.branches.add(name, transcript)
    repl.screen.print(f"kept as branch {name} ({_turns(transcript)}); you go on in a copy")


def branches(repl: Repl, argument: str) -> None:
    chat = repl.chat
    left = chat.transcript
    if not argument:
        rows = [
            f"{name}  {_turns(kept)}{'  (here)' if kept == left else ''}"
            for name, kept in repl.branches
        ]
        repl.screen.print("\n".join(rows) or "no branches; /fork makes one")
        return
    if argument not in repl.branches:
        raise CliError(f"no branch {argument}", hint="/branches lists them")
    target = repl.branches[argument]
    cost = chat.cost_of_history(target)
    chat.transcript = target
    lines = [f"on branch {argument}: {_turns(chat.transcript)} ({cost})"]
    repl.screen.print("\n".join(lines + _keep_what_was_left(repl, left, "before-switch")))


def save(repl: Repl, argument: str) -> None:
    if not argument:
        raise CliError("/save needs a file name", hint="/save chat.json")
    path, log = Path(os.path.expanduser(argument)), repl.chat.log
    if log is not None and path.exists() and path.samefile(log.path):
        raise CliError(f"{path} is the transcript of this chat", hint="another name")
    known = path.suffix.lower() in WRITABLE  # otherwise save_chat says what is wrong
    if known and path.exists() and not repl.prompt.confirm(f"{path} exists. Overwrite it?"):
        repl.screen.console.note("not saved")
        return
    chat = repl.chat
    save_chat(chat.saved_form(), path)
    chat.saved = chat.transcript
    repl.screen.print(f"saved {_turns(chat.transcript)} to {path}")


def load(repl: Repl, argument: str) -> None:
    if not argument:
        raise CliError("/load needs a file name", hint="/load chat.json")
    path = Path(os.path.expanduser(argument))
    chat, saved = repl.chat, load_chat(path)
    left = chat.transcript
    notes = restore(chat, saved, str(path), flags_win=False)
    lines = [f"loaded {_turns(chat.transcript)} from {path}", *notes]
    repl.screen.print("\n".join(lines + _keep_what_was_left(repl, left, "before-load")))


def _keep_what_was_left(repl: Repl, left: Transcript, occasion: str) -> list[str]:
    """Put the chat that was left aside; return the line that says where, where anything was said in it."""
    kept = None if left == repl.chat.transcript else repl.branches.keep_safe(left, occasion)
    return [] if kept is None else [f"the chat so far is kept: /branches {kept}"]


def _turns(transcript: Transcript) -> str:
    return count_text(transcript.num_turns, "turn")


def _last_question(transcript: Transcript) -> str:
    question = transcript.last_question
    if question is None:
        raise CliError("nothing has been asked yet")
    return question


def _read_edited(repl: Repl, text: str) -> str | None:
    try:
        edited = repl.prompt.edit(text).strip()
    except (PromptInterrupt, EOFError):
        edited = ""
    if not edited:
        repl.screen.console.note("nothing was changed")
        return None
    return edited
