"""What the model is sent, as text and in tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minivllm_cli.chat.transcript import Message, ThinkingInHistory, Transcript
from minivllm_engine.core.errors import RequestError

if TYPE_CHECKING:
    from minivllm_engine.text.tokenizer import Tokenizer

_PROBE = "thinking-probe"
_LONG_TEXT = 1 << 20  # characters that take more than a moment to encode


@dataclass(frozen=True, slots=True)
class Template:
    """A tokenizer's chat template with what this chat tells it.

    Attributes:
        kwargs: `enable_thinking` and the like.
        thinking: whether earlier thinking goes with the history, and how.
    """

    tokenizer: "Tokenizer"
    kwargs: Mapping[str, Any]
    thinking: ThinkingInHistory = "drop"

    def render(self, transcript: Transcript, *, open_answer: bool = True) -> str:
        """Render the prompt as text; with `open_answer` it ends where the answer begins.

        Raises:
            RequestError: the template refuses these messages.
        """
        return self.tokenizer.render_chat(
            transcript.for_engine(self.thinking), add_generation_prompt=open_answer, **self.kwargs
        )

    def count(self, transcript: Transcript, *, open_answer: bool = True) -> int:
        """Count the tokens of the prompt. An empty transcript has none, whatever the template would say."""
        if not transcript.messages and transcript.system is None:
            return 0
        return len(self.tokenizer.encode(self.render(transcript, open_answer=open_answer)))

    def check_length(self, asked: Transcript, max_model_len: int) -> None:
        """Refuse a turn that cannot fit whatever its tokens are, before they are counted at length.

        Raises:
            RequestError: it has too many bytes, or the template refuses these messages.
        """
        least = self._least_tokens(asked)
        if least >= max_model_len:
            question = Transcript(messages=asked.messages[-1:])
            is_question = self._least_tokens(question) >= max_model_len
            raise RequestError(
                f"this turn needs at least {least:,} tokens; the context has {max_model_len:,}",
                hint="a shorter message" if is_question else "/clear",
                code="prompt_too_long",
            )

    def _least_tokens(self, transcript: Transcript) -> int:
        text = self.render(transcript)
        if len(text) < _LONG_TEXT:
            return 0
        ids = range(self.tokenizer.largest_id + 1)
        longest = max(len(self.tokenizer.token_bytes(token)) for token in ids)
        return len(text.encode("utf-8", "replace")) // longest

    def check_system(self, text: str | None) -> None:
        """Find out whether the model gets to see a system text.

        Raises:
            RequestError: the template refuses it, or leaves it out.
        """
        asked = Transcript(messages=(Message("user", "x"),))
        if text is None or not text.strip():
            return
        without = self.render(asked)
        try:
            shown, why = self.render(asked.with_system(text)) != without, None
        except RequestError as error:
            shown, why = False, error.why
        if not shown:
            raise RequestError(
                "this model's chat template takes no system text",
                why=why or "the prompt is the same without it",
                hint="say it in the first message",
            )

    def cost_of_history(self, transcript: Transcript) -> int:
        """Count the tokens that the next turn has to compute before it comes to the new message."""
        try:
            return self.count(transcript, open_answer=False)
        except RequestError:  # some templates want a question
            asked = transcript.asked("x")
            return self.count(asked) - self.count(Transcript(messages=asked.messages[-1:]))

    def continued(self, transcript: Transcript) -> str:
        """Render the prompt that makes the model go on with the last answer."""
        answer = transcript.last_answer
        assert answer is not None
        prompt = self.render(transcript.without_answer())
        if prompt.rstrip().endswith("<think>"):
            prompt += f"{answer.reasoning or ''}\n</think>\n\n"
        elif answer.reasoning and not prompt.rstrip().endswith("</think>"):
            prompt += f"<think>\n{answer.reasoning}\n</think>\n\n"
        return prompt + answer.content


def way_to_keep_thinking(tokenizer: "Tokenizer") -> tuple[ThinkingInHistory, dict[str, Any]] | None:
    """Find how earlier thinking can stay in the prompt, and template arguments for it; None if it cannot.

    Found by trying: templates drop it from earlier turns in several ways.
    """
    probe = Transcript(
        messages=(
            Message("user", "a"),
            Message("assistant", "b", reasoning=_PROBE),
            Message("user", "c"),
        )
    )
    forms: tuple[ThinkingInHistory, ...] = ("reasoning_content", "inline")
    arguments: list[dict[str, Any]] = [{}]
    if "preserve_thinking" in (tokenizer.chat_template or ""):
        arguments.append({"preserve_thinking": True})
    for form in forms:
        for kwargs in arguments:
            if _PROBE in Template(tokenizer, kwargs, form).render(probe):
                return form, kwargs
    return None
