"""Text to token ids and back: tokenizer.json by `tokenizers`, conversations by the chat template.

AutoTokenizer is not used: it imports torch, and for `qwen3_5_text` it replaces the split pattern of
tokenizer.json by another model's.
"""

import json
import logging
import unicodedata
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import tokenizers

from minivllm_engine.core.errors import CheckpointError, RequestError
from minivllm_engine.core.escape import listed
from minivllm_engine.model_config.generation_config import read_json_object
from minivllm_engine.text.chat_template import read_templates, render_conversation
from minivllm_engine.text.messages import Message, plain_tools, read_messages

logger = logging.getLogger(__name__)

_NormalForm = Literal["NFC", "NFD", "NFKC", "NFKD"]

_COPY_AGAIN = "copy the file again from where the model came from"


class Tokenizer:
    """A byte-level BPE tokenizer with its chat template.

    Attributes:
        chat_template: the Jinja source, or None where the model has none.
        tool_template: that for requests with tools, where it is another one.
        num_embeddings: ids from there on have no embedding; None where that is not known.
        eos_ids: the id of the tokenizer's own end token, if it names one.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        settings: Mapping[str, Any],
        chat_template: str | None,
        tool_template: str | None = None,
    ) -> None:
        self._backend = backend
        self._settings = settings
        self.chat_template = chat_template
        self.tool_template = tool_template
        self.num_embeddings: int | None = None
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
        except BaseException as error:
            if not _is_of_library(error):
                raise
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
        templates = read_templates(model_path, settings)
        return cls(backend, settings, templates.get("default"), templates.get("tool_use"))

    @classmethod
    def for_model(cls, model_path: Path, vocab_size: int) -> "Tokenizer":
        """Read as `from_dir` does, for a model whose embedding has `vocab_size` rows.

        Added tokens beyond the embedding are warned of: prompts that use one are refused.

        Raises:
            CheckpointError: also where ids of the vocabulary itself lie beyond it.
        """
        tokenizer = cls.from_dir(model_path)
        tokenizer.num_embeddings = vocab_size
        if tokenizer.largest_id < vocab_size:
            return tokenizer
        vocabulary = tokenizer._backend.get_vocab(with_added_tokens=False).values()
        largest = max((i for i in vocabulary if i not in tokenizer._added), default=-1)
        if largest >= vocab_size:
            raise CheckpointError(
                f"{model_path}: tokenizer.json and config.json do not belong together",
                why=f"the tokenizer has ids up to {largest}, vocab_size is {vocab_size}",
                hint="copy the tokenizer.json that came with these weights",
            )
        beyond = [token.content for i, token in tokenizer._added.items() if i >= vocab_size]
        logger.warning(
            "%s: the model has no embedding for %s; prompts with %s are refused",
            model_path,
            listed(beyond),
            "it" if len(beyond) == 1 else "them",
        )
        return tokenizer

    def to_json(self) -> str:
        """Return tokenizer.json as it is used here."""
        text: str = self._backend.to_str()
        return text

    @property
    def has_chat_template(self) -> bool:
        return self.chat_template is not None

    @property
    def vocab_size(self) -> int:
        """Tokens that have an id. The model's embedding may have more rows."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def largest_id(self) -> int:
        """The largest id that encoding can give."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @cached_property
    def _longest_token(self) -> int:
        """Bytes of the longest token."""
        pieces = self._backend.get_vocab(with_added_tokens=False)
        added = (len(token.content.encode()) for token in self._added.values())
        return max(max(map(len, pieces), default=1), max(added, default=1))

    @cached_property
    def _normal_form(self) -> "_NormalForm | Literal[''] | None":
        """How text is normalised before it is split ("": not at all).

        None where a text may lose bytes by other ways: then its length says nothing of its tokens.
        """
        parts = json.loads(self._backend.to_str())
        form = (parts.get("normalizer") or {}).get("type", "")
        strips = any(token.lstrip or token.rstrip for token in self._added.values())
        removes = '"Removed"' in json.dumps(parts.get("pre_tokenizer"))
        vocabulary = self._backend.get_vocab(with_added_tokens=False)
        has_all = all(char in vocabulary for char in self._byte_of_char)
        known = form in ("", "NFC", "NFD", "NFKC", "NFKD")
        return form if known and has_all and not strips and not removes else None

    def encode(self, text: str) -> list[int]:
        """Return token ids of `text`. Special tokens written in it become their ids; nothing is added.

        A lone surrogate is no character: it is read as U+FFFD.
        """
        clean = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        try:
            return self._encode(clean)
        except BaseException as error:
            if not _is_of_library(error):
                raise
            raise RequestError(
                "the tokenizer fails on this text",
                why=f"{type(error).__name__}: {' '.join(str(error).split())}"[:200],
                code="unreadable_prompt",
            ) from None

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def least_tokens(self, text: str) -> int:
        """Return a number of tokens that `text` has at least, known without encoding it."""
        longest = self._longest_token
        if len(text) <= longest or self._normal_form is None:
            return 0
        if self._normal_form and not text.isascii():
            text = unicodedata.normalize(self._normal_form, text)
        return len(text.encode("utf-8", "replace")) // longest

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return text of `ids`; ids without a token give nothing."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        """Return one token as text, special ones included; U+FFFD where it is a part of a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for; empty for an id without a token."""
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
        try:
            return bytes(self._byte_of_char[char] for char in piece)
        except KeyError:  # a token that stands for no bytes of a text
            return str(piece).encode()

    def is_added(self, token_id: int) -> bool:
        """Tell whether it is outside the BPE vocabulary, such as `</think>`. Such a token is never split."""
        return token_id in self._added

    def is_special(self, token_id: int) -> bool:
        """Tell whether it is left out of decoded text."""
        added = self._added.get(token_id)
        return added is not None and bool(added.special)

    @cached_property
    def think_ids(self) -> tuple[int, int] | None:
        """Ids of `<think>` and `</think>`, where both are single tokens."""
        opening, closing = map(self._backend.token_to_id, ("<think>", "</think>"))
        return None if opening is None or closing is None else (opening, closing)

    def template_for(self, tools: object) -> str:
        """Return the source of the chat template: that for tools where there is one and tools are given.

        Raises:
            RequestError: there is none.
        """
        template = self.tool_template if tools and self.tool_template else self.chat_template
        if template is None:
            raise RequestError(
                "this model has no chat template", hint="send `prompt` instead of `messages`"
            )
        return template

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> str:
        """Return the prompt of a conversation, as the model's chat template writes it.

        Raises:
            RequestError: there is no template, or it refuses these messages.
        """
        tokens = {
            name: _token_content(value) for name, value in self._settings.items() if "token" in name
        }
        return render_conversation(
            self.template_for(tools),
            read_messages(messages),
            plain_tools(tools),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            values={name: text for name, text in tokens.items() if text} | template_kwargs,
        )

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> list[int]:
        """Render as `render_chat` does, and encode."""
        return self.encode(self.render_chat(messages, tools=tools, **template_kwargs))

    def answer_start(self, ids: Sequence[int]) -> int | None:
        """Return where a chat's prompt stops telling the conversation and opens the answer.

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


def _is_of_library(error: BaseException) -> bool:
    """Tell an error of `tokenizers` from what is meant for the program. A panic in Rust is no Exception."""
    return isinstance(error, Exception) or type(error).__module__ == "pyo3_runtime"


def _token_content(value: object) -> str:
    content = value.get("content") if isinstance(value, Mapping) else value
    return content if isinstance(content, str) else ""
