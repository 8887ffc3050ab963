"""Commands that change how the next answer is made and shown."""

from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from minivllm_cli.chat.arguments import no_argument, whole_number
from minivllm_cli.chat.prompts import way_to_keep_thinking
from minivllm_cli.chat.session import SAMPLING_KEYS
from minivllm_cli.config.schema import check_value
from minivllm_cli.config.show import shown_value
from minivllm_cli.config.yaml import parse_value
from minivllm_cli.errors import CliError
from minivllm_engine.core.sampling_params import SamplingParams
from minivllm_engine.text.chat_template import switches_thinking

if TYPE_CHECKING:
    from minivllm_cli.chat.repl import Repl

THINK_CHOICES = (
    ("on", "ask the template for thinking"),
    ("off", "ask the template for none"),
    ("show", "show it like the answer"),
    ("fold", "show it dimmed, then a line"),
    ("hide", "show the line only"),
    ("keep", "leave thinking in the history"),
    ("drop", "send no earlier thinking again"),
)


def system(repl: "Repl", argument: str) -> None:
    """`/system TEXT`, `@FILE`, `-`; alone it shows the text."""
    chat = repl.chat
    if not argument:
        repl.screen.print(chat.transcript.system or "no system text")
        return
    text = None if argument == "-" else argument
    if argument.startswith("@"):
        path = Path(argument[1:]).expanduser()
        try:
            text = path.read_text(encoding="utf-8-sig").strip()
        except OSError as error:
            raise CliError(f"{path} cannot be read", why=error.strerror or str(error)) from None
        except ValueError:
            raise CliError(f"{path} is not UTF-8") from None
    chat.transcript = chat.transcript.with_system(text)
    cost = chat.cost_of_history(chat.transcript)
    what = "removed" if text is None else "replaced"
    repl.screen.print(f"system text {what} ({cost})")


def set_key(repl: "Repl", argument: str) -> None:
    """`/set KEY VALUE`, or `KEY=VALUE` as `--set` takes it."""
    key, _, text = argument.partition(" ")
    if "=" in key:
        key, _, text = argument.partition("=")
    if not key:
        raise CliError("/set needs a key and a value", hint="/set temperature 0.7")
    if key not in SAMPLING_KEYS:
        near = get_close_matches(key, SAMPLING_KEYS, n=1)
        raise CliError(
            f"/set {key}: no such key", hint=near[0] if near else ", ".join(SAMPLING_KEYS)
        )
    if not text.strip():
        now = shown_value(repl.chat.settings, f"sampling.{key}")
        raise CliError(f"/set {key} needs a value", hint=f"/set {key} {now}")
    try:
        raw = parse_value(text)
    except yaml.YAMLError:
        raise CliError(
            f"/set {key} {text}: the value is not YAML", hint="put quotes around it"
        ) from None
    _put(repl, key, raw, f"/set {argument}", "/set")


def seed(repl: "Repl", argument: str) -> None:
    """`/seed N`"""
    if not argument:
        raise CliError("/seed needs a number", hint="/seed 7")
    _put(repl, "seed", whole_number("/seed", argument), f"/seed {argument}", "/seed")


def think(repl: "Repl", argument: str) -> None:
    """`/think on|off`, `show|fold|hide`, `keep|drop`"""
    match argument:
        case "on" | "off":
            _switch_thinking(repl, argument == "on")
        case "show" | "fold" | "hide":
            repl.screen.thinking = argument
        case "keep":
            _keep_thinking(repl)
        case "drop":
            repl.chat.thinking_in_history, repl.chat.keep_kwargs = "drop", {}
        case _:
            words = [word for word, _ in THINK_CHOICES]
            near = get_close_matches(argument, words, n=1)
            raise CliError(
                f"/think {argument}: no such choice", hint=near[0] if near else ", ".join(words)
            )
    repl.screen.print(f"thinking: {describe_thinking(repl)}")


def describe_thinking(repl: "Repl") -> str:
    """How thinking stands: asked for, shown, kept."""
    asked = {None: "the template's default", True: "on", False: "off"}[repl.chat.think]
    kept = "not kept" if repl.chat.thinking_in_history == "drop" else "kept"
    return f"{asked}, {repl.screen.thinking}, {kept} in the history"


def stats(repl: "Repl", argument: str) -> None:
    """`/stats on|off`"""
    if argument not in ("on", "off"):
        raise CliError(f"/stats {argument}".rstrip() + ": on or off", hint="/stats off")
    repl.screen.stats = argument == "on"
    repl.screen.print(f"statistics {argument}")


def multi(repl: "Repl", argument: str) -> None:
    """`/multi`"""
    no_argument("/multi", argument)
    repl.prompt.newline_on_enter = not repl.prompt.newline_on_enter
    sends, breaks = "Enter", "Alt-Enter"
    if repl.prompt.newline_on_enter:
        sends, breaks = breaks, sends
    repl.screen.print(f"{sends} sends, {breaks} breaks the line")


def _put(repl: "Repl", key: str, raw: object, shown: str, source: str) -> None:
    chat, path = repl.chat, f"sampling.{key}"
    if raw is None:
        chat.put(key, None, source)
        if key == "seed":
            chat.draw_seed()
    else:
        value, wrong = check_value(path, raw)
        if wrong:
            raise CliError(f"{shown}: {wrong}")
        SamplingParams.create(**{key: value})
        chat.put(key, value, source)
    repl.screen.print(f"{key} {shown_value(chat.settings, path)}")


def _switch_thinking(repl: "Repl", on: bool) -> None:
    if not switches_thinking(repl.chat.llm.tokenizer):
        raise CliError("this model's chat template has no switch for thinking")
    repl.chat.think = on


def _keep_thinking(repl: "Repl") -> None:
    way = way_to_keep_thinking(repl.chat.llm.tokenizer)
    if way is None:
        raise CliError("this model's chat template drops earlier thinking")
    repl.chat.thinking_in_history, repl.chat.keep_kwargs = way
