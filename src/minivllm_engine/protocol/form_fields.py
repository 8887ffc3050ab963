"""The form of an answer as other tools say it: OpenAI's `response_format`, vLLM's `structured_outputs`."""

from typing import Any

from minivllm_engine.protocol.lines import LineProblem

FORM_KEYS = ("response_format", "structured_outputs")
_NAMES = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
}


def read_form(sampling: dict[str, Any]) -> dict[str, Any]:
    """Return the sampling with `structured` in the place of such a key.

    Raises:
        LineProblem: a key is not what its tool would take, or the form is given twice.
    """
    found = dict(sampling)
    given = "structured" in found
    for key, read in zip(FORM_KEYS, (_response_format, _structured_outputs), strict=True):
        form = read(found.pop(key)) if key in found else None
        if form is None:
            continue
        if given:
            raise LineProblem("invalid_field", "the form of the answer is given twice", key=key)
        found["structured"], given = form, True
    return found


def _response_format(value: Any) -> dict[str, Any] | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind == "json_schema":
        inner = value.get("json_schema")
        if isinstance(inner, dict) and isinstance(inner.get("schema"), dict | bool):
            return {"json_schema": inner["schema"]}
        what = "response_format.json_schema should be an object with a schema"
        raise LineProblem("invalid_field", what, key="response_format")
    what = "response_format.type should be text, json_object or json_schema"
    raise LineProblem("invalid_field", what, key="response_format")


def _structured_outputs(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or len(value) != 1 or not set(value) <= set(_NAMES):
        what = f"structured_outputs should be an object with one of {', '.join(_NAMES)}"
        raise LineProblem("invalid_field", what, key="structured_outputs")
    ((name, content),) = value.items()
    return {_NAMES[name]: content}
