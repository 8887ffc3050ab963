"""Flags that act on each request and have no config key: thinking, forced and default sampling."""

from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import yaml

from minivllm_cli.batch.flags import GenerateFlags
from minivllm_cli.config.flags import ThinkFlags
from minivllm_cli.config.yaml import parse_value
from minivllm_cli.errors import CliError
from minivllm_engine.core.errors import RequestError
from minivllm_engine.core.sampling_params import SamplingParams
from minivllm_engine.protocol.fields import plain_reason
from minivllm_engine.text.chat_template import switches_thinking

if TYPE_CHECKING:
    from minivllm_engine.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Overrides:
    """What flags say about every request.

    Attributes:
        think: for the template's `enable_thinking`; None leaves it to the template.
        defaults: sampling where a line says nothing.
        forced: sampling that beats the line's.
    """

    think: bool | None
    defaults: dict[str, Any]
    forced: dict[str, Any]

    @classmethod
    def read(cls, flags: GenerateFlags, think: ThinkFlags) -> "Overrides":
        """Take them from the command line.

        Raises:
            CliError: a parameter that does not exist, a wrong value, contradicting flags.
        """
        given = {"logprobs": flags.logprobs, "prompt_logprobs": flags.prompt_logprobs}
        defaults = {name: count for name, count in given.items() if count is not None}
        for name, count in defaults.items():
            _check({name: count}, "--" + name.replace("_", "-"))
        forced = _read_forced(flags.force_param or [])
        _check(forced, "--force-param")
        return cls(think.enabled, defaults, forced)


def check_thinking(think: bool | None, tokenizer: "Tokenizer", model: str) -> None:
    """Refuse `--think` and `--no-think` where nothing would come of them.

    Raises:
        CliError: the model's chat template has no such switch.
    """
    if think is None or switches_thinking(tokenizer):
        return
    flag = "--think" if think else "--no-think"
    raise CliError(
        f"{flag}: the chat template of {model} has no switch for thinking"
        if tokenizer.has_chat_template
        else f"{flag}: {model} has no chat template",
        hint=f"drop {flag}",
    )


def forced_keys(assignments: list[str]) -> set[str]:
    """The parameters that `--force-param` sets."""
    return {_split(text)[0] for text in assignments}


def _split(text: str) -> tuple[str, str, str]:
    key, equals, value = text.partition("=")
    return key.strip().replace("-", "_"), equals, value


def _read_forced(assignments: list[str]) -> dict[str, Any]:
    forced: dict[str, Any] = {}
    known = list(SamplingParams.model_fields)
    for text in assignments:
        key, equals, value = _split(text)
        if not equals or not key:
            raise CliError(f"--force-param {text}: not K=V", hint="--force-param temperature=0")
        if key not in known:
            near = get_close_matches(key, known, n=1)
            what = f"--force-param {text}: unknown parameter {key}"
            raise CliError(what, hint=f"--force-param {near[0]}={value}" if near else None)
        if key in forced:
            raise CliError(f"--force-param {key} is given twice")
        try:
            forced[key] = parse_value(value)
        except (yaml.YAMLError, RecursionError):
            raise CliError(f"--force-param {text}: the value is not YAML") from None
    return forced


def _check(values: dict[str, Any], flag: str) -> None:
    try:
        SamplingParams.create(**values)
    except RequestError as error:
        raise CliError(f"{flag}: {plain_reason(error.what)}", why=error.why) from None
