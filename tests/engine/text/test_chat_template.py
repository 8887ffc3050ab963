"""Chat templates beside transformers', and what is refused rather than lost."""
# ruff: noqa: E501  # templates stay on one line

import json
from pathlib import Path
from typing import Any

import pytest

from minivllm_engine.core.errors import CheckpointError, RequestError
from minivllm_engine.text.prompt import read_prompt
from minivllm_engine.text.tokenizer import Tokenizer
from support.byte_tokenizer import CHAT_TEMPLATE, byte_backend, byte_tokenizer, write_byte_tokenizer
from support.qwen35_tokenizer import CHAT_TEMPLATE as QWEN

KNOWS_TEXT = CHAT_TEMPLATE  # prints m.content, whatever it is
KNOWS_PARTS = "{% for m in messages %}[{{ m.role }}]{% for part in m.content %}{{ part.text }}{% endfor %}\n{% endfor %}"
TOOLS = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}{% for k, v in c.function.arguments.items() %}<{{ k }}={{ v }}>"
    "{% endfor %}{% endfor %}\n{% endfor %}"
)
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "Hi"}


def with_template(template: str, tool_template: str | None = None) -> Tokenizer:
    return Tokenizer(byte_backend(), {"eos_token": "<|im_end|>"}, template, tool_template)


def by_transformers(template: str | list[dict[str, str]], messages: list[Any], **how: Any) -> str:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_backend(), eos_token="<|im_end|>")
    tokenizer.chat_template = (
        template
        if isinstance(template, str)
        else {one["name"]: one["template"] for one in template}
    )
    how = {"add_generation_prompt": not how.get("continue_final_message"), **how}
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, **how)
    return text


def text(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": one} for one in texts]


def call(arguments: object) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "look", "arguments": arguments}}
        ],
    }


class TestContent:
    def test_text_parts_are_joined_for_a_template_that_knows_only_text(self) -> None:
        parts = [{"role": "user", "content": text("Hi ", "there")}]
        joined = [{"role": "user", "content": "Hi there"}]
        for template in (
            KNOWS_TEXT,
            "{{ messages[0].content.strip() }}",
            "{{ messages[0].content + '' }}",
        ):
            tokenizer = with_template(template)
            assert tokenizer.render_chat(parts) == tokenizer.render_chat(joined)

    def test_a_template_that_reads_parts_gets_them(self) -> None:
        parts = [
            {"role": "user", "content": text("Hi ", "there")},
            {"role": "assistant", "content": text("x")},
        ]
        for template in (KNOWS_PARTS, QWEN.read_text()):
            assert with_template(template).render_chat(parts) == by_transformers(template, parts)
        # It would print nothing of a plain text.
        assert with_template(KNOWS_PARTS).render_chat([USER]) == "[user]Hi"

    def test_null_beside_calls_is_no_text(self) -> None:
        shown = with_template(TOOLS).render_chat([USER, call({})], tools=[TOOL])
        assert shown.endswith("user: Hiassistant: ")

    @pytest.mark.parametrize(
        ("message", "what"),
        [
            ({"content": "x"}, "messages[1] has no role"),
            ({"role": "user"}, "messages[1] has no content"),
            ({"role": "user", "content": None}, "messages[1] has no content"),
            ({"role": "user", "content": 5}, "messages[1].content should be a string"),
            (
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
                "messages[1].content[0] should be",
            ),
            ({"role": "user", "content": "x", "images": ["y"]}, "messages[1].images is not read"),
            (
                {"role": "assistant", "content": "x", "prefix": True},
                "messages[1].prefix is not read",
            ),
            (
                {"role": "user", "content": "x", "extra": object()},
                "messages[1].extra is no JSON data",
            ),
            (5, "messages[1] should be an object"),
        ],
    )
    def test_what_no_template_reads_is_refused_with_its_place(
        self, message: Any, what: str
    ) -> None:
        for prompt in ([USER, message], {"messages": [USER, message]}):
            with pytest.raises(RequestError) as caught:
                read_prompt(prompt, byte_tokenizer())
            if message != 5 or isinstance(prompt, dict):
                assert caught.value.what.startswith(what)

    def test_messages_nested_beyond_bearing_are_a_request_error(self) -> None:
        deep: Any = "x"
        for _ in range(5000):
            deep = [deep]
        with pytest.raises(RequestError, match="nested too deeply"):
            byte_tokenizer().render_chat([{**USER, "extra": deep}])


class TestToolCalls:
    @pytest.mark.parametrize("given", ['{"city": "Köln"}', {"city": "Köln"}])
    def test_arguments_may_be_json_text(self, given: object) -> None:
        messages = [USER, call(given)]
        shown = with_template(TOOLS).render_chat(messages, tools=[TOOL])
        assert "<city=Köln>" in shown
        assert shown == by_transformers(TOOLS, [USER, call({"city": "Köln"})], tools=[TOOL])

    @pytest.mark.parametrize("given", ["", None, " ", {}])
    def test_none_at_all_is_an_empty_object(self, given: object) -> None:
        assert "<" not in with_template(TOOLS).render_chat([USER, call(given)])

    @pytest.mark.parametrize("given", ["{", "[1]", "5", 5, [1], '{"a": 1} x', "[" * 100_000])
    def test_what_is_no_object_is_named_by_its_place(self, given: object) -> None:
        with pytest.raises(RequestError) as caught:
            with_template(TOOLS).render_chat([USER, call(given)])
        place = "messages[1].tool_calls[0].function.arguments"
        assert caught.value.what.startswith(place)

    def test_the_callers_messages_stay_as_they_were(self) -> None:
        message = call('{"a": 1}')
        with_template(TOOLS).render_chat([USER, message])
        assert message == call('{"a": 1}')


class TestTools:
    def test_a_template_that_shows_no_tools_is_named(self) -> None:
        tokenizer = with_template(KNOWS_TEXT)
        for tools in (None, []):
            assert read_prompt({"messages": [USER], "tools": tools}, tokenizer)[1]
        with pytest.raises(RequestError, match="tools: the chat template does not show them"):
            read_prompt({"messages": [USER], "tools": [TOOL]}, tokenizer)
        assert "look" in with_template(TOOLS).render_chat([USER], tools=[TOOL])
        only_tools = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}"
        assert with_template(KNOWS_TEXT, only_tools).render_chat([USER], tools=[TOOL]) == "look"

    def test_tool_use_is_chosen_as_by_transformers(self, tmp_path: Path) -> None:
        write_byte_tokenizer(tmp_path)
        (tmp_path / "chat_template.jinja").unlink()
        both = [
            {"name": "tool_use", "template": TOOLS},
            {"name": "default", "template": KNOWS_TEXT},
        ]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": both}))
        as_list = Tokenizer.from_dir(tmp_path)
        (tmp_path / "tokenizer_config.json").write_text("{}")
        (tmp_path / "chat_template.jinja").write_text(KNOWS_TEXT)
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(TOOLS)
        as_folder = Tokenizer.from_dir(tmp_path)
        for tools in (None, [TOOL]):
            for tokenizer in (as_list, as_folder):
                shown = tokenizer.render_chat([USER], tools=tools)
                assert shown == by_transformers(both, [USER], tools=tools)


class TestPrefill:
    @pytest.mark.parametrize("template", [KNOWS_TEXT, QWEN.read_text(), TOOLS])
    @pytest.mark.parametrize("said", ["A striped", "A striped ", " \n1.", "Grüße 🙂"])
    def test_it_is_as_by_transformers(self, template: str, said: str) -> None:
        messages = [USER, {"role": "assistant", "content": said}]
        tokenizer = with_template(template)
        ids, is_chat = read_prompt(
            {"messages": messages, "continue_final_message": True}, tokenizer
        )
        expected = by_transformers(template, messages, continue_final_message=True)
        assert ids == tokenizer.encode(expected) and is_chat
        assert expected.endswith(said.strip()) or expected.endswith(said)

    def test_parts_are_continued_too(self) -> None:
        messages = [USER, {"role": "assistant", "content": text("A ", "striped")}]
        shown = with_template(KNOWS_TEXT).render_chat(messages, continue_final_message=True)
        assert shown.endswith("assistant\nA striped")

    @pytest.mark.parametrize(
        ("last", "what"),
        [
            (USER, "messages[1] is not of the assistant"),
            ({"role": "assistant", "content": ""}, "messages[1] has no content"),
        ],
    )
    def test_there_must_be_something_to_continue(self, last: dict[str, str], what: str) -> None:
        with pytest.raises(RequestError) as caught:
            byte_tokenizer().render_chat([USER, last], continue_final_message=True)
        assert what in caught.value.what

    def test_a_template_that_changes_the_message_cannot(self) -> None:
        tokenizer = with_template("{{ messages[-1].content | upper }}")
        with pytest.raises(RequestError, match="does not show the last message"):
            tokenizer.render_chat(
                [USER, {"role": "assistant", "content": "x"}], continue_final_message=True
            )


class TestArguments:
    def test_enable_thinking_has_a_key_of_its_own(self) -> None:
        tokenizer = byte_tokenizer()
        for value in (True, False):
            inside = {"messages": [USER], "chat_template_kwargs": {"enable_thinking": value}}
            beside = {"messages": [USER], "enable_thinking": value}
            expected = tokenizer.encode_chat([USER], enable_thinking=value)
            assert (
                read_prompt(inside, tokenizer)[0] == read_prompt(beside, tokenizer)[0] == expected
            )
            assert read_prompt({**inside, **beside}, tokenizer)[0] == expected

    @pytest.mark.parametrize(
        ("more", "what", "hint"),
        [
            ({"enable_thinking": "no"}, "enable_thinking should be true or false", None),
            ({"continue_final_message": 1}, "continue_final_message should be true", None),
            (
                {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
                "enable_thinking is given twice",
                None,
            ),
            (
                {"chat_template_kwargs": {"enable_thinkin": True}},
                "enable_thinkin: the chat template does not read it",
                "did you mean enable_thinking?",
            ),
            ({"chat_template_kwargs": {"zz": True}}, "zz: the chat template", None),
            ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs: tools", None),
            ({"tools": {}}, "tools should be", None),
        ],
    )
    def test_what_would_do_nothing_is_refused(self, more: Any, what: str, hint: str | None) -> None:
        with pytest.raises(RequestError) as caught:
            read_prompt({"messages": [USER], **more}, byte_tokenizer())
        assert caught.value.what.startswith(what) and caught.value.hint == hint


SYSTEM = {"role": "system", "content": "Be brief."}
DEVELOPER = {"role": "developer", "content": "Be brief."}


class TestRefusals:
    @pytest.mark.parametrize(
        ("messages", "place", "hint"),
        [
            (
                [DEVELOPER, USER],
                "messages[0] has the role 'developer'",
                "give messages[0] the role",
            ),
            (
                [USER, SYSTEM],
                "messages[1] has the role 'system' and is not the first",
                "put it first",
            ),
            ([SYSTEM, SYSTEM, USER], "messages[1] has the role 'system'", "put it first"),
            ([SYSTEM, USER, DEVELOPER], "messages[2] has the role 'developer'", "put it first"),
        ],
    )
    def test_qwens_template_and_where_system_messages_stand(
        self, messages: list[dict[str, str]], place: str, hint: str
    ) -> None:
        with pytest.raises(RequestError) as caught:
            with_template(QWEN.read_text()).render_chat(messages)
        assert caught.value.why.startswith(place) and hint in caught.value.hint

    def test_no_remedy_is_given_that_does_not_work(self) -> None:
        with pytest.raises(RequestError) as caught:
            with_template(QWEN.read_text()).render_chat([SYSTEM, SYSTEM])
        assert caught.value.hint is None and "no user query" in caught.value.why


HOSTILE = {
    "loops in loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "work in a filter": "{% for i in range(99999) %}{{ range(99999) | sum }}{% endfor %}",
    "slices": "{% set b = range(99999) | list %}{% for i in range(99999) %}{{ b[1:] | length }}{% endfor %}",
    "comparisons": "{% set s = 'x' * 999999 %}{% for i in range(99999) %}{{ 'y' in s }}{% endfor %}",
    "calls that branch": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "calls without end": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a recursive loop": "{% for i in range(999) recursive %}{{ loop(range(999)) if loop.depth < 9 }}{% endfor %}",
    "output": "{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
    "a product": "{{ 'x' * 10 ** 12 }}",
    "a list times": "{{ ['x' * 99999] * 99999 }}",
    "a power": "{{ 9 ** (9 ** 9) }}",
    "padding": "{{ 'x'.center(10 ** 12) }}{{ 'x' | center(10 ** 12) }}",
    "a format": "{{ '{:1000000000000}'.format(1) }}",
    "another format": "{{ '%1000000000000d' % 1 }}",
    "joining": "{{ range(99999) | map('string') | join('x' * 999999) }}",
    "replacing": "{{ ('x' * 99999).replace('x', 'y' * 99999) }}",
    "doubling": "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubling in a block": (
        "{% set n = namespace(x='ab') %}{% for i in range(99) %}"
        "{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}"
    ),
    "nesting": (
        "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
        "{{ n.x | tojson }}"
    ),
    "Python": "{{ ''.__class__.__mro__ }}",
    "the caller's list": "{{ messages.append(1) }}",
}


@pytest.mark.parametrize("template", HOSTILE.values(), ids=HOSTILE)
def test_b5_a_template_that_does_too_much_is_refused(template: str) -> None:
    with pytest.raises(RequestError) as caught:
        with_template(template).render_chat([USER])
    assert "chat template" in caught.value.what and caught.value.why


def test_a_long_conversation_is_within_the_bounds() -> None:
    """Also for a template that looks at all messages for each, as many do to find the last question."""
    messages = [USER, {"role": "assistant", "content": "x " * 500}] * 400
    squared = "{% for m in messages %}{% for n in messages %}{% endfor %}{{ m.content | trim }}{% endfor %}"
    for template in (squared, QWEN.read_text()):
        assert with_template(template).render_chat(messages) == by_transformers(template, messages)
    huge = [{"role": "user", "content": "x" * 20_000_000}]
    assert len(with_template(QWEN.read_text()).render_chat(huge)) > 20_000_000


def nested(statement: str, end: str, depth: int) -> str:
    return statement * depth + end * depth


@pytest.mark.parametrize(
    "template",
    [
        *(
            [1, 2],
            [{"name": "default"}],
            [{"name": "default", "template": 5}],
            5,
            {"default": "x"},
            True,
        ),
        nested("{% if 1 %}", "{% endif %}", 300),
        nested("{% for a in b %}", "{% endfor %}", 40),
        "{{ " + "(" * 5000 + ")" * 5000 + " }}",
        "{{ " + "1+" * 50_000 + "1 }}",
        "{{ x | no_such_filter }}",
        "x" * (2**20 + 1),
        "",
    ],
    ids=lambda one: str(one)[:20],
)
def test_b6_templates_that_are_none_are_named(tmp_path: Path, template: Any) -> None:
    write_byte_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(CheckpointError, match=r"chat_template in .*tokenizer_config\.json"):
        Tokenizer.from_dir(tmp_path)


@pytest.mark.parametrize(
    "render",
    [
        "{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}{{ x }}",
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% break %}{% endfor %}",
        "{{ messages | length }} {{ messages[::-1] | map(attribute='role') | join(',') }} {{ loop is defined }}",
        "{% for m in messages %}{{ loop.length }}{{ loop.revindex }}{{ loop.previtem is defined }}{% endfor %}",
        "{% set n = namespace(a=1) %}{% for m in messages %}{% set n.a = n.a + 1 %}{% endfor %}{{ n.a }}",
        "{{ messages | tojson(indent=2) }}{{ {'ä': '<'} | tojson }}",
        "{{ 'a %s b' % 1 }} {{ 'a{}'.format(2) }} {{ 3 * 'ab' }} {{ 2 ** 10 }} {{ 'a' ~ 1 ~ none }}",
        "{{ documents is none }} {{ tools is none }} {{ dict(a=1).a }} {{ messages[0].get('name', 'x') }}",
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ 'a\\nb' | indent(2) }}",
        "{% macro f(m) %}{{ m.role }}{% endmacro %}{% for m in messages %}{{ f(m) }}{% else %}none{% endfor %}",
        "{% filter upper %}{{ messages[0].content }}{% endfilter %}{% with a=1 %}{{ a }}{% endwith %}",
        "{{ eos_token }}{{ bos_token }}{{ add_generation_prompt }}\n{% if true %}\n  x\n{% endif %}\n",
        "{% for k, v in messages[0] | items %}{{ k }}={{ v }};{% endfor %}{{ messages[0] | dictsort }}",
        "{{ messages[1].reasoning_content }}{{ messages[1].thinking }}{{ messages[1].gone is defined }}",
    ],
)
def test_the_sandbox_renders_as_transformers_does(render: str) -> None:
    messages = [
        USER,
        {"role": "assistant", "content": "x\ny", "reasoning": "hm", "gone": None},
        {"role": "user", "content": "<b>&amp;'"},
    ]
    assert with_template(render).render_chat(messages) == by_transformers(render, messages)
