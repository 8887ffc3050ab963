"""Commands that change how the next answer is made and shown. Most of them alone tell the setting."""

import yaml

from minivllm_cli.chat.parse_line import whole_number
from minivllm_cli.chat.prompts import way_to_keep_thinking
from minivllm_cli.chat.repl import Repl
from minivllm_cli.chat.session import SAMPLING_KEYS, check_seed
from minivllm_cli.chat.show_commands import describe_thinking, sampling_table, show
from minivllm_cli.config.schema import check_value
from minivllm_cli.config.show import shown_value
from minivllm_cli.config.yaml import parse_value
from minivllm_cli.errors import CliError
from minivllm_cli.files.input_file import read_text
from minivllm_engine.core.sampling_params import SamplingParams
from minivllm_engine.core.suggest import suggest
from minivllm_engine.text.chat_template import switches_thinking

THINK_CHOICES = (
    ("on", "ask the template for thinking"),
    ("off", "ask the template for none"),
    ("show", "show it like the answer"),
    ("fold", "show it dimmed, then a line"),
    ("hide", "show the line only"),
    ("keep", "leave thinking in the history"),
    ("drop", "send no earlier thinking again"),
)


def system(repl: Repl, argument: str) -> None:
    """Replace the system text by TEXT, that of @FILE or, with -, none; alone show it."""
    chat = repl.chat
    if not argument:
        repl.screen.print(chat.transcript.system or "no system text")
        return
    text = None if argument == "-" else read_text("/system", argument)
    chat.template.check_system(text)
    replaced = chat.transcript.with_system(text)
    cost = chat.cost_of_history(replaced)
    chat.transcript = replaced
    what = "removed" if text is None else "replaced"
    repl.screen.print(f"system text {what} ({cost})")


def set_key(repl: Repl, argument: str) -> None:
    """Set KEY VALUE, or KEY=VALUE as `--set` takes it; without a value show what is set."""
    if not argument:
        repl.screen.print(sampling_table(repl.chat))
        return
    blank = "=" if "=" in argument.partition(" ")[0] else " "
    key, _, text = argument.partition(blank)
    if key not in SAMPLING_KEYS:
        near = suggest(key, SAMPLING_KEYS)
        raise CliError(f"/set {key}: no such key", hint=near or ", ".join(SAMPLING_KEYS))
    if not text.strip():
        repl.screen.print(sampling_table(repl.chat, key))
        return
    try:
        raw = parse_value(text)
    except yaml.YAMLError:
        raise CliError(
            f"/set {key} {text}: the value is not YAML", hint="put quotes around it"
        ) from None
    if raw is None and text.strip() not in ("null", "~"):  # YAML's comment
        raise CliError(
            f"/set {argument}: there is no value before the #", hint="put quotes around it"
        )
    _put(repl, key, raw, f"/set {argument}", "/set")


def seed(repl: Repl, argument: str) -> None:
    """Set the seed; alone show it."""
    if not argument:
        repl.screen.print(sampling_table(repl.chat, "seed"))
        return
    _put(repl, "seed", whole_number("/seed", argument, least=0), f"/seed {argument}", "/seed")


def think(repl: Repl, argument: str) -> None:
    """Set whether there is thinking, how it is shown, whether it stays; alone show the setting."""
    chat = repl.chat
    match argument:
        case "":
            pass
        case "on" | "off":
            if not switches_thinking(chat.llm.tokenizer):
                raise CliError("this model's chat template has no switch for thinking")
            chat.think = argument == "on"
        case "show" | "fold" | "hide":
            repl.screen.thinking = argument
        case "keep":
            way = way_to_keep_thinking(chat.llm.tokenizer)
            if way is None:
                raise CliError("this model's chat template drops earlier thinking")
            chat.thinking_in_history, chat.keep_kwargs = way
        case "drop":
            chat.thinking_in_history, chat.keep_kwargs = "drop", {}
        case _:
            words = [word for word, _ in THINK_CHOICES]
            near = suggest(argument, words)
            raise CliError(f"/think {argument}: no such choice", hint=near or ", ".join(words))
    repl.screen.print(f"thinking: {describe_thinking(repl)}")


def stats(repl: Repl, argument: str) -> None:
    """Switch the line after an answer; alone show what the chat has cost."""
    if argument not in ("", "on", "off"):
        raise CliError(f"/stats {argument}: on or off", hint="/stats off")
    if argument:
        repl.screen.stats = argument == "on"
        repl.screen.print(f"statistics {argument}")
        return
    show(repl, "stats")


def multi(repl: Repl, argument: str) -> None:
    repl.prompt.newline_on_enter = not repl.prompt.newline_on_enter
    sends, breaks = "Enter", "Alt-Enter"
    if repl.prompt.newline_on_enter:
        sends, breaks = breaks, sends
    repl.screen.print(f"{sends} sends, {breaks} breaks the line")


def history(repl: Repl, argument: str) -> None:
    """Forget what was typed; alone tell the file."""
    if argument not in ("", "clear"):
        raise CliError(f"/history {argument}: what to do with it?", hint="/history clear")
    file = repl.history
    if file is None:
        raise CliError("there is no history: --no-history")
    if not argument:
        repl.screen.print(str(file.path))
        return
    try:
        file.clear()
    except OSError as error:
        raise CliError(f"{file.path} cannot be written", why=error.strerror) from None
    repl.screen.print(f"{file.path} is empty now")


def _put(repl: Repl, key: str, raw: object, shown: str, source: str) -> None:
    chat, path = repl.chat, f"sampling.{key}"
    if raw is None:
        chat.put(key, None, source)
        if path not in chat.settings.entries and key == "seed":
            chat.draw_seed()
    else:
        value, wrong = check_value(path, raw)
        if wrong:
            raise CliError(f"{shown}: {wrong}")
        if key == "seed":
            check_seed(shown, value)
        SamplingParams.create(**{key: value})
        chat.put(key, value, source)
    repl.screen.print(f"{key} {shown_value(chat.settings, path)}")
