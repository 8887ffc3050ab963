"""Conversations as prompts, as a checkpoint's chat template writes them; and why one refuses."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from minivllm_engine.core.errors import CheckpointError, RequestError
from minivllm_engine.core.escape import escape
from minivllm_engine.text.messages import joined_parts
from minivllm_engine.text.template_sandbox import (
    CompiledTemplate,
    TemplateLimit,
    compile_template,
    render,
)

_Messages = list[dict[str, Any]]

_USUAL_ROLES = ("system", "user", "assistant", "tool")
_REASONING = ("reasoning_content", "thinking", "reasoning")
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


class _HasTemplate(Protocol):
    chat_template: str | None


def switches_thinking(tokenizer: _HasTemplate) -> bool:
    """Tell whether the chat template looks at `enable_thinking`."""
    source = tokenizer.chat_template
    return source is not None and "enable_thinking" in compile_template(source).variables


def check_template(source: object, where: str) -> str:
    """Return a template's source if it can be used.

    Args:
        where: what an error calls it.

    Raises:
        CheckpointError: it is no text, empty, or no valid Jinja.
    """
    again = "Copy it again from where the model came from."
    if not isinstance(source, str):
        raise CheckpointError(f"{where} is no text", why=f"but {escape(repr(source))}", hint=again)
    if not source.strip():
        raise CheckpointError(
            f"{where} is empty",
            why="every prompt would become an empty one",
            hint=f"Remove it. {again}",
        )
    try:
        compile_template(source)
    except Exception as error:  # of Jinja, or of Python where the code that Jinja makes is too deep
        why = escape(f"{type(error).__name__}: {error}")
        raise CheckpointError(f"{where} is not valid Jinja", why=why, hint=again) from None
    return source


def read_templates(model_path: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates of a checkpoint by name: "default", "tool_use", ...

    chat_template.jinja and additional_chat_templates/NAME.jinja count before tokenizer_config.json.

    Raises:
        CheckpointError: one of them cannot be read or used.
    """
    own = settings.get("chat_template")
    found: dict[str, tuple[object, str]] = {}
    where = f"chat_template in {model_path / 'tokenizer_config.json'}"
    if isinstance(own, list):  # several by name
        for entry in own:
            name = entry.get("name") if isinstance(entry, Mapping) else None
            if not isinstance(name, str):
                raise CheckpointError(
                    f"{where} is no list of named templates",
                    why=f"it holds {escape(repr(entry))}",
                    hint='Each should be {"name": "...", "template": "..."}.',
                )
            found[name] = entry.get("template"), f"{where}, {escape(name)},"
    elif own is not None:
        found["default"] = own, where
    files = {"default": model_path / "chat_template.jinja"}
    files |= {
        path.name.removesuffix(".jinja"): path
        for path in sorted((model_path / "additional_chat_templates").glob("*.jinja"))
    }
    for name, path in files.items():
        if path.is_file():
            found[name] = _read(path), str(path)
    return {name: check_template(source, place) for name, (source, place) in found.items()}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read",
            why=str(error),
            hint="Copy the file again from where the model came from.",
        ) from None


def render_conversation(
    source: str,
    messages: _Messages,
    tools: list[dict[str, Any]] | None,
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    values: Mapping[str, Any],
) -> str:
    """Write a conversation as a prompt.

    Args:
        messages, tools: as `read_messages` and `plain_tools` give them.
        continue_final_message: the prompt ends within the last message, for the model to go on with it.
        values: further ones for the template: special tokens, `enable_thinking`, ...

    Raises:
        RequestError: the template refuses the conversation, shows no tools, or does too much.
    """
    template = compile_template(source)
    messages = [_with_reasoning(message) for message in messages]
    fixed = {"documents": None, "add_generation_prompt": add_generation_prompt, **values}
    if continue_final_message:
        messages, fixed["add_generation_prompt"] = _tagged(messages), False

    def write(messages: _Messages, tools: list[dict[str, Any]] | None = tools) -> str:
        return _with_all_parts(template, {**fixed, "messages": messages, "tools": tools})

    try:
        text = write(messages)
    except Exception as error:  # a template may raise anything about what it is given
        raise _refusal(error, messages, write) from None
    if tools is not None and _same_without(write, messages, text):
        raise RequestError(
            "tools: the chat template does not show them to the model",
            why="the prompt is the same without them",
            hint="leave tools out, or describe them in a message",
        )
    return _cut_at_tag(text, messages[-1]) if continue_final_message else text


def _same_without(write: Callable[[_Messages, None], str], messages: _Messages, text: str) -> bool:
    """Tell whether the prompt is the same without tools; one that cannot do without is not."""
    try:
        return write(messages, None) == text
    except Exception:
        return False


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Reasoning under each of the names that templates read."""
    found = next((message[key] for key in _REASONING if key in message), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


def _with_all_parts(template: CompiledTemplate, values: dict[str, Any]) -> str:
    """Render contents in the form that the template understands: text, or a list of text parts."""
    messages: _Messages = values["messages"]
    joined = [joined_parts(message) for message in messages]
    if joined != messages:
        try:
            text = render(template, values)
        except TemplateLimit:
            raise
        except Exception:  # one that knows only text
            return render(template, values | {"messages": joined})
        parted = [m["content"] for m in messages if isinstance(m.get("content"), list)]
        if all(_shows(text, content) for content in parted):
            return text
    text = render(template, values | {"messages": joined})
    asked = [m["content"] for m in joined if m.get("role") == "user" and m.get("content")]
    if all(content.strip() in text for content in asked):
        return text
    parts = [m | {"content": [{"type": "text", "text": m.get("content", "")}]} for m in joined]
    try:
        other = render(template, values | {"messages": parts})
    except Exception:
        return text
    return other if all(_shows(other, m["content"]) for m in parts if m["role"] == "user") else text


def _shows(text: str, content: list[dict[str, Any]]) -> bool:
    """Does the prompt have the parts' texts, and not Python's way of writing a list?"""
    return str(content) not in text and all(part["text"].strip() in text for part in content)


def _tagged(messages: _Messages) -> _Messages:
    """The messages with a mark at the end of the last one."""
    last, place = messages[-1], f"messages[{len(messages) - 1}]"
    if last["role"] != "assistant":
        raise RequestError(
            f"continue_final_message: {place} is not of the assistant",
            why=f"its role is {last['role']!r}",
        )
    content = last.get("content")
    if not content:
        raise RequestError(f"continue_final_message: {place} has no content to continue")
    if isinstance(content, str):
        return [*messages[:-1], last | {"content": content + _TAG}]
    end = content[-1] | {"text": content[-1]["text"] + _TAG}
    return [*messages[:-1], last | {"content": [*content[:-1], end]}]


def _cut_at_tag(text: str, last: dict[str, Any]) -> str:
    content = last["content"]
    said = (content if isinstance(content, str) else content[-1]["text"]).removesuffix(_TAG)
    if said.strip() not in text or _TAG.strip() not in text:
        raise RequestError(
            "continue_final_message: the chat template does not show the last message as it is"
        )
    start = text.rindex(_TAG.strip())
    # Without the space behind it the template trims, and did so with the message.
    return text[:start] if text.startswith(_TAG, start) else text[:start].rstrip()


def _refusal(
    error: Exception, messages: _Messages, write: Callable[[_Messages], str]
) -> RequestError:
    """What to say of messages that the template refused, with a remedy that was tried."""
    if isinstance(error, TemplateLimit):
        return RequestError("the chat template cannot be run on these messages", why=str(error))
    reason = escape(f"{type(error).__name__}: {error}", 500)

    def works(others: _Messages) -> bool:
        try:
            write(others)
        except Exception:
            return False
        return True

    what = "the chat template refuses these messages"
    for place, why, others, hint in _other_ways(messages):
        if works(others):
            return RequestError(what, why=f"{place} {why} ({reason})", hint=hint)
    for i, message in enumerate(messages):
        if message["role"] not in _USUAL_ROLES:
            known = ", ".join(_USUAL_ROLES)
            reason += f" (messages[{i}] has the role {message['role']!r}, not {known})"
            break
    return RequestError(what, why=reason)


def _other_ways(messages: _Messages) -> list[tuple[str, str, _Messages, str]]:
    """A message that templates may not take where it stands, why, and the conversation without that."""
    found = []
    renamed = [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
    if renamed != messages:
        place = f"messages[{[m['role'] for m in messages].index('developer')}]"
        why = "has the role 'developer'"
        found.append((place, why, renamed, f"give {place} the role 'system'"))
    systems = [i for i, m in enumerate(renamed) if m["role"] == "system"]
    if systems and systems != [0]:
        late = next(i for i in systems if i > 0)
        texts = [str(joined_parts(renamed[i]).get("content", "")) for i in systems]
        first = {"role": "system", "content": "\n\n".join(texts)}
        others = [first, *(m for m in renamed if m["role"] != "system")]
        why = f"has the role {messages[late]['role']!r} and is not the first"
        hint = "make one system message of all of them, and put it first"
        found.append((f"messages[{late}]", why, others, hint))
    return found
