"""Commands that change the transcript: drop, answer again, edit, extend, branch."""

import secrets
from dataclasses import replace
from typing import TYPE_CHECKING

from minivllm_cli.chat.arguments import no_argument, positive_number, whole_number
from minivllm_cli.chat.prompt import PromptInterrupt
from minivllm_cli.chat.transcript import Transcript
from minivllm_cli.errors import CliError
from minivllm_engine.core.units import count_text

if TYPE_CHECKING:
    from minivllm_cli.chat.repl import Repl


def clear(repl: "Repl", argument: str) -> None:
    """`/clear`"""
    no_argument("/clear", argument)
    chat = repl.chat
    dropped = chat.transcript.num_turns
    kept = repl.branches.keep_safe(chat.transcript, "before-clear")
    chat.transcript = chat.transcript.cleared()
    way_back = "" if kept is None else f"; /branches {kept} brings back what was said"
    repl.screen.print(f"cleared {turns(dropped)}{way_back}")


def undo(repl: "Repl", argument: str) -> None:
    """`/undo [N]`"""
    chat = repl.chat
    count = positive_number("/undo", argument) if argument else 1
    there = chat.transcript.num_turns
    if count > there:
        raise CliError(f"cannot undo {turns(count)}: the chat has {there}")
    chat.transcript = chat.transcript.without_turns(count)
    cost = chat.cost_of_history(chat.transcript)
    repl.screen.print(f"undone {turns(count)} ({cost})")


def regen(repl: "Repl", argument: str) -> None:
    """`/regen [SEED]`"""
    chat = repl.chat
    question = _last_question(chat.transcript)
    seed = whole_number("/regen", argument) if argument else secrets.randbelow(2**31)
    if chat.settings.resolved("sampling.temperature") == 0:
        repl.screen.console.note("temperature 0: every seed gives the same answer")
    elif not argument:
        repl.screen.console.dim(f"seed {seed}")
    history = chat.transcript.without_turns(1)
    repl.turn(lambda view, stop: chat.ask(history, question, view, stop, seed=seed))


def edit(repl: "Repl", argument: str) -> None:
    """`/edit`"""
    no_argument("/edit", argument)
    chat = repl.chat
    edited = _read_edited(repl, _last_question(chat.transcript))
    if edited is None:
        return
    history = chat.transcript.without_turns(1)
    repl.turn(lambda view, stop: chat.ask(history, edited, view, stop))


def edit_reply(repl: "Repl", argument: str) -> None:
    """`/edit-reply`"""
    no_argument("/edit-reply", argument)
    chat = repl.chat
    answer = chat.transcript.last_answer
    if answer is None:
        raise CliError("there is no answer to edit yet")
    edited = _read_edited(repl, answer.content)
    if edited is None:
        return
    chat.transcript = chat.transcript.without_answer().answered(replace(answer, content=edited))
    cost = chat.cost_of_history(chat.transcript)
    repl.screen.print(f"answer replaced ({cost}); /continue extends it")


def extend(repl: "Repl", argument: str) -> None:
    """`/continue`"""
    no_argument("/continue", argument)
    chat = repl.chat
    answer = chat.transcript.last_answer
    if answer is None:
        raise CliError("there is no answer to extend")
    if not answer.content:
        longer = "/set max_tokens N, then " if answer.finish_reason == "length" else ""
        raise CliError(
            "there is no answer to extend",
            why="it ended before its first word",
            hint=f"{longer}/regen",
        )
    repl.turn(chat.extend)


def fork(repl: "Repl", argument: str) -> None:
    """`/fork [NAME]`"""
    name = argument or repl.branches.free_number("branch")
    if name in repl.branches:
        raise CliError(f"there is a branch {name} already", hint="another name")
    transcript = repl.chat.transcript
    repl.branches.add(name, transcript)
    repl.screen.print(f"kept as branch {name} ({turns(transcript.num_turns)}); you go on in a copy")


def branches(repl: "Repl", argument: str) -> None:
    """`/branches [NAME]`"""
    chat = repl.chat
    if not argument:
        rows = [_branch_row(name, kept, chat.transcript) for name, kept in repl.branches]
        repl.screen.print("\n".join(rows) or "no branches; /fork makes one")
        return
    if argument not in repl.branches:
        raise CliError(f"no branch {argument}", hint="/branches lists them")
    left, target = chat.transcript, repl.branches[argument]
    chat.transcript = target
    lines = [f"on branch {argument}: {turns(target.num_turns)} ({chat.cost_of_history(target)})"]
    if left != target:
        kept = repl.branches.keep_safe(left, "before-switch")
        lines += so_far_is_kept(kept)
    repl.screen.print("\n".join(lines))


def so_far_is_kept(branch: str | None) -> list[str]:
    """The line that says where the chat is that was left; none where nothing was said in it."""
    return [] if branch is None else [f"the chat so far is kept: /branches {branch}"]


def _branch_row(name: str, kept: Transcript, present: Transcript) -> str:
    here = "  (here)" if kept == present else ""
    return f"{name}  {turns(kept.num_turns)}{here}"


def turns(count: int) -> str:
    """A count of turns in words."""
    return count_text(count, "turn")


def _last_question(transcript: Transcript) -> str:
    question = transcript.last_question
    if question is None:
        raise CliError("nothing has been asked yet")
    return question


def _read_edited(repl: "Repl", text: str) -> str | None:
    try:
        edited = repl.prompt.edit(text).strip()
    except (PromptInterrupt, EOFError):
        edited = ""
    if not edited:
        repl.screen.console.note("nothing was changed")
        return None
    return edited
