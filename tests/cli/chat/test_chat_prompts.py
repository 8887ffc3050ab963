"""What the model is sent: thinking kept or not, answers extended, the limit of the context to the token."""

import pytest

from minivllm_cli.chat.context_limit import ContextLimit
from minivllm_cli.chat.prompts import Template, way_to_keep_thinking
from minivllm_cli.chat.show_commands import prompt_ids
from minivllm_cli.chat.transcript import Message, Transcript
from minivllm_cli.errors import CliError
from minivllm_engine.checkpoint.index import resolve_model
from minivllm_engine.core.errors import RequestError
from minivllm_engine.text.chat_template import switches_thinking
from minivllm_engine.text.tokenizer import Tokenizer
from support.byte_tokenizer import byte_backend, byte_tokenizer

ANSWERED = Transcript("Be brief.").asked("q").answered(Message("assistant", "yes", reasoning="hm"))


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer.from_dir(resolve_model("demo"))


def _tokenizer(template: str) -> Tokenizer:
    return Tokenizer(byte_backend(), {}, template)


def test_ways_to_keep_thinking_are_found_by_trying(demo):
    assert way_to_keep_thinking(demo) == ("reasoning_content", {"preserve_thinking": True})
    assert way_to_keep_thinking(byte_tokenizer()) == ("inline", {})
    strips = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
    assert way_to_keep_thinking(_tokenizer(strips)) is None
    shows = "{% for m in messages %}{{ m.reasoning_content }}{{ m.content }}{% endfor %}"
    assert way_to_keep_thinking(_tokenizer(shows)) == ("reasoning_content", {})


def test_kept_thinking_is_in_the_prompt_of_the_next_turn(demo):
    form, kwargs = way_to_keep_thinking(demo)
    asked = ANSWERED.asked("more")
    assert "<think>\nhm\n</think>\n\nyes" in Template(demo, kwargs, form).render(asked)
    assert "hm" not in Template(demo, {}).render(asked)


def test_the_switch_for_thinking(demo):
    assert switches_thinking(demo)
    assert not switches_thinking(_tokenizer("{{ messages }}"))


@pytest.mark.parametrize(
    ("kwargs", "reasoning", "end"),
    [
        ({}, None, "assistant\nyes"),
        ({}, "hm", "assistant\n<think>\nhm\n</think>\n\nyes"),
        ({"enable_thinking": True}, "hm", "assistant\n<think>\nhm\n</think>\n\nyes"),
        ({"enable_thinking": True}, None, "assistant\n<think>\n\n</think>\n\nyes"),
        ({"enable_thinking": False}, None, "assistant\n<think>\n\n</think>\n\nyes"),
    ],
)
def test_an_answer_is_extended_where_it_ended(demo, kwargs, reasoning, end):
    transcript = Transcript().asked("q").answered(Message("assistant", "yes", reasoning=reasoning))
    for tokenizer in (demo, byte_tokenizer()):
        prompt = Template(tokenizer, kwargs).continued(transcript)
        assert prompt == f"<|im_start|>user\nq<|im_end|>\n<|im_start|>{end}"


def test_tokens_of_a_history(demo):
    for tokenizer in (demo, byte_tokenizer()):
        template = Template(tokenizer, {})
        history = template.cost_of_history(ANSWERED)
        asked = template.count(ANSWERED.asked("more"))
        question = template.count(Transcript().asked("more"))
        assert asked == history + question
        # The demo's template refuses messages without a question.
        alone = template.cost_of_history(Transcript("Be brief."))
        assert alone == len(tokenizer.encode("<|im_start|>system\nBe brief.<|im_end|>\n"))
        assert template.cost_of_history(Transcript()) == 0


def test_a_prompt_may_leave_room_for_one_token():
    template = Template(byte_tokenizer(), {})
    asked = ANSWERED.asked("more")
    needed = template.count(asked) + 1
    ContextLimit(needed, needed, lambda _: True, str).check(template, asked)
    with pytest.raises(RequestError, match=f"needs {needed} tokens, 1 over") as caught:
        ContextLimit(needed - 1, needed - 1, lambda _: True, str).check(template, asked)
    assert caught.value.code == "prompt_too_long"
    assert caught.value.hint == "/clear"


def test_a_longer_context_is_proposed_only_where_it_fits():
    template = Template(byte_tokenizer(), {})
    asked = Transcript().asked("x" * 100)
    tried = []

    def hint(largest: int, fits: bool) -> str:
        def would_fit(length: int) -> bool:
            tried.append(length)
            return fits

        with pytest.raises(RequestError) as caught:
            ContextLimit(50, largest, would_fit, "--longer {}".format).check(template, asked)
        return caught.value.hint

    assert hint(4096, True) == "restart with --longer 1024 (fits)"
    assert hint(200, True) == "restart with --longer 200 (fits)"
    assert hint(4096, False) == "a shorter message"
    assert hint(60, True) == "a shorter message"
    assert tried == [1024, 200, 1024]


def test_k39_the_prompt_that_is_shown_is_the_one_that_was_sent(demo):
    class _Chat:
        transcript = ANSWERED
        template = Template(demo, {"enable_thinking": True})

        class llm:
            tokenizer = demo

    asked = Transcript(ANSWERED.system, ANSWERED.messages[:1]).for_engine()
    assert prompt_ids(_Chat) == demo.encode_chat(asked, enable_thinking=True)
    _Chat.transcript = Transcript()
    with pytest.raises(CliError, match="nothing has been asked"):
        prompt_ids(_Chat)
