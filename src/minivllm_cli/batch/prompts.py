"""From a line to the token ids that the model gets."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minivllm_cli.batch.flags import Truncate
from minivllm_engine.core.request import ReadyRequest
from minivllm_engine.core.sampling_params import ResolvedSampling
from minivllm_engine.protocol.lines import RequestLine

if TYPE_CHECKING:
    from minivllm_engine.text.tokenizer import Tokenizer

# A prompt that was cut to the limit itself would leave one token for the answer.
_MOST_ROOM = 4


@dataclass(frozen=True, slots=True)
class BuiltPrompt:
    """A prompt as it is sent. `truncated` tokens were cut out of it."""

    request: ReadyRequest
    truncated: int = 0

    @property
    def ids(self) -> tuple[int, ...]:
        return self.request.prompt_ids


class PromptBuilder:
    """Applies the chat template, encodes, and cuts where that was asked for.

    Args:
        think: for the template's `enable_thinking`; None leaves it alone. A line's own value wins.
        template_for_prompts: raw text becomes a user message.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        max_model_len: int,
        *,
        think: bool | None = None,
        template_for_prompts: bool = False,
        truncate: Truncate | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._kwargs = {} if think is None else {"enable_thinking": think}
        self._template_for_prompts = template_for_prompts
        self._truncate = truncate

    def build(self, line: RequestLine, params: ResolvedSampling) -> BuiltPrompt:
        """Token ids of a line.

        Raises:
            RequestError: the chat template refuses the messages, or there is none.
        """
        from minivllm_engine.text.prompt import read_prompt

        ids, is_chat = read_prompt(self._as_mapping(line), self._tokenizer)
        return self._cut(ids, is_chat, params)

    def is_too_long(self, prompt: BuiltPrompt) -> bool:
        """Would the engine refuse it for its length?"""
        return len(prompt.ids) + 1 > self._max_model_len

    def _as_mapping(self, line: RequestLine) -> dict[str, Any]:
        if line.kind == "tokens":
            return {"prompt_token_ids": line.prompt}
        messages: Any = line.prompt
        if line.kind != "messages":
            if not self._template_for_prompts:
                return {"prompt": line.prompt}
            messages = [{"role": "user", "content": line.prompt}]
        kwargs = {**self._kwargs, **line.template_kwargs}
        return {"messages": messages, "tools": line.tools, "chat_template_kwargs": kwargs}

    def _cut(self, ids: list[int], is_chat: bool, params: ResolvedSampling) -> BuiltPrompt:
        limit = self._max_model_len
        if self._truncate is None or len(ids) + 1 <= limit:
            return BuiltPrompt(ReadyRequest(tuple(ids), params, is_chat))
        room = max(min(params.max_tokens, limit // _MOST_ROOM), 1)
        keep = max(limit - room, 1)
        cut = len(ids) - keep
        if self._truncate is Truncate.LEFT:
            left = ids[cut:]
        else:
            head = (keep + 1) // 2
            left = ids[:head] + ids[head + cut :]
        return BuiltPrompt(ReadyRequest(tuple(left), params, is_chat), cut)
