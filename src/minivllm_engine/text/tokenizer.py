"""Text to token ids and back, and chat templates: tokenizer.json by `tokenizers`, templates by transformers.

AutoTokenizer is not used: it imports torch, and for `qwen3_5_text` it replaces the split pattern of
tokenizer.json by another model's.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import tokenizers

from minivllm_engine.core.errors import CheckpointError, RequestError
from minivllm_engine.model_config.generation_config import read_json_object

Message = Mapping[str, Any]

_USUAL_ROLES = ("system", "user", "assistant", "tool")

_COPY_AGAIN = "copy the file again from where the model came from"


class Tokenizer:
    """A byte-level BPE tokenizer with its chat template.

    Attributes:
        chat_template: the Jinja source, or None where the model has none.
        eos_ids: the id of the tokenizer's own end token, if it names one.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, settings: Mapping[str, Any], chat_template: str | None
    ) -> None:
        self._backend = backend
        self._settings = settings
        self.chat_template = chat_template
        self._added = backend.get_added_tokens_decoder()
        self._token_bytes: dict[int, bytes] = {}
        eos = backend.token_to_id(_token_content(settings.get("eos_token")))
        self.eos_ids: tuple[int, ...] = () if eos is None else (eos,)

    @classmethod
    def from_dir(cls, model_path: Path) -> "Tokenizer":
        """Read tokenizer.json, tokenizer_config.json and chat_template.jinja of a checkpoint.

        Raises:
            CheckpointError: tokenizer.json is missing, broken, or not byte-level.
        """
        path = model_path / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(
                f"{model_path} has no tokenizer.json",
                why="text cannot become token ids without it",
                hint="copy tokenizer.json, tokenizer_config.json, chat_template.jinja and "
                "generation_config.json of the model into it",
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # `tokenizers` raises plain Exception
            raise CheckpointError(
                f"{path} cannot be read", why=str(error), hint=_COPY_AGAIN
            ) from None
        decoder = json.loads(backend.to_str()).get("decoder") or {}
        kinds = {decoder.get("type"), *(part.get("type") for part in decoder.get("decoders", ()))}
        if "ByteLevel" not in kinds:
            raise CheckpointError(
                f"{path}: only byte-level tokenizers are supported",
                why=f"its decoder is {decoder.get('type')!r}",
                hint="use the tokenizer.json of a model of the Qwen3.5 family",
            )
        # A limit or padding stored by a trainer would cut or fill prompts without a word.
        backend.no_truncation()
        backend.no_padding()
        settings_path = model_path / "tokenizer_config.json"
        settings = read_json_object(settings_path) if settings_path.exists() else {}
        template = _read_chat_template(model_path, settings)
        if template is not None:
            _check_template(template, model_path)
        return cls(backend, settings, template)

    @property
    def has_chat_template(self) -> bool:
        return self.chat_template is not None

    @property
    def vocab_size(self) -> int:
        """Tokens that have an id. The model's embedding may have more rows."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def largest_id(self) -> int:
        """The largest id that encoding can give."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. Special tokens written in it become their ids; nothing is added.

        A lone surrogate is no character: it is read as U+FFFD.
        """
        clean = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        ids: list[int] = self._backend.encode(clean, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; ids without a token give nothing."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        """One token as text, special ones included; U+FFFD where it is a part of a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; empty for an id without a token."""
        known = self._token_bytes.get(token_id)
        if known is None:
            known = self._token_bytes[token_id] = self._look_up_bytes(token_id)
        return known

    def _look_up_bytes(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None:
            content: str = added.content
            return content.encode()
        piece = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        return bytes(self._byte_of_char[char] for char in piece)

    def is_added(self, token_id: int) -> bool:
        """Is it a token outside the BPE vocabulary, such as `</think>`? Such a token is never split."""
        return token_id in self._added

    def is_special(self, token_id: int) -> bool:
        """Is it left out of decoded text?"""
        added = self._added.get(token_id)
        return added is not None and bool(added.special)

    @cached_property
    def think_ids(self) -> tuple[int, int] | None:
        """Ids of `<think>` and `</think>`, where both are single tokens."""
        opening, closing = map(self._backend.token_to_id, ("<think>", "</think>"))
        return None if opening is None or closing is None else (opening, closing)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """The prompt of a conversation, as the model's chat template writes it.

        Raises:
            RequestError: there is no template, or it refuses these messages.
        """
        if self.chat_template is None:
            raise RequestError(
                "this model has no chat template", hint="send `prompt` instead of `messages`"
            )
        # transformers costs half a second: only chats pay for it.
        from transformers.utils.chat_template_utils import render_jinja_template

        tokens = {
            name: _token_content(value) for name, value in self._settings.items() if "token" in name
        }
        kwargs = {name: text for name, text in tokens.items() if text} | template_kwargs
        try:
            rendered, _ = render_jinja_template(
                conversations=[[dict(message) for message in messages]],
                tools=list(tools) if tools else None,
                chat_template=self.chat_template,
                add_generation_prompt=add_generation_prompt,
                **kwargs,
            )
        except Exception as error:  # a template may raise anything about what it is given
            raise RequestError(
                "the chat template refuses these messages",
                why=f"{type(error).__name__}: {error}{_unusual_role(messages)}",
            ) from None
        text: str = rendered[0]
        return text

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> list[int]:
        """`render_chat`, as token ids."""
        return self.encode(self.render_chat(messages, tools=tools, **template_kwargs))

    def answer_start(self, ids: Sequence[int]) -> int | None:
        """Where a chat's prompt stops telling the conversation and opens the answer.

        None where the prompt does not end as this template opens answers.
        """
        for opening in self._answer_openings:
            if len(ids) >= len(opening) and tuple(ids[len(ids) - len(opening) :]) == opening:
                return len(ids) - len(opening)
        return None

    @cached_property
    def _answer_openings(self) -> list[tuple[int, ...]]:
        """The ends that the template's `add_generation_prompt` gives a prompt, longest first."""
        found = set()
        probe = [{"role": "user", "content": "x"}]
        choices: tuple[dict[str, Any], ...] = (
            {},
            {"enable_thinking": True},
            {"enable_thinking": False},
        )
        for choice in choices:
            try:
                without = self.render_chat(probe, add_generation_prompt=False, **choice)
                with_opening = self.render_chat(probe, **choice)
            except RequestError:  # a template that wants more than a question
                continue
            if with_opening.startswith(without) and with_opening != without:
                found.add(tuple(self.encode(with_opening[len(without) :])))
        return sorted(found, key=len, reverse=True)

    @cached_property
    def _byte_of_char(self) -> dict[str, int]:
        # GPT-2's stand-ins: printable bytes stand for themselves, the others follow from 256 on.
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [b for b in range(256) if b not in set(printable)]
        table = {chr(b): b for b in printable}
        return table | {chr(256 + i): b for i, b in enumerate(others)}


def _check_template(template: str, model_path: Path) -> None:
    if not template.strip():
        raise CheckpointError(
            f"the chat template of {model_path} is empty",
            why="every prompt would become an empty one",
            hint="remove chat_template.jinja, or copy it again from where the model came from",
        )
    try:
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except jinja2.TemplateSyntaxError:
        # transformers knows statements that plain Jinja does not; it has the last word.
        from transformers.utils.chat_template_utils import _compile_jinja_template

        try:
            _compile_jinja_template(template)
        except jinja2.TemplateError as error:
            raise CheckpointError(
                f"the chat template of {model_path} is not valid Jinja",
                why=str(error),
                hint="copy chat_template.jinja again from where the model came from",
            ) from None


def _unusual_role(messages: Sequence[Message]) -> str:
    """Why a template may have refused messages, if one has a role that templates hardly know."""
    for place, message in enumerate(messages):
        role = message.get("role")
        if role not in _USUAL_ROLES:
            return f" (messages[{place}] has the role {role!r}, not {', '.join(_USUAL_ROLES)})"
    return ""


def _token_content(value: object) -> str:
    content = value.get("content") if isinstance(value, Mapping) else value
    return content if isinstance(content, str) else ""


def _read_chat_template(model_path: Path, settings: Mapping[str, Any]) -> str | None:
    path = model_path / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path} cannot be read", why=str(error), hint=_COPY_AGAIN
            ) from None
    template = settings.get("chat_template")
    if isinstance(template, list):  # an older form: several templates by name
        by_name = {entry.get("name"): entry.get("template") for entry in template}
        template = by_name.get("default")
    return template if isinstance(template, str) else None
