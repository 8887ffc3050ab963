"""`--print-config`: the resolved config as YAML that gives the same result when it is read again."""

import json
from typing import Any

from minivllm_cli.config.schema import SECTIONS, accepts_auto, all_paths, default_of
from minivllm_cli.config.settings import Settings
from minivllm_cli.config.yaml import dump_value


def render_config(settings: Settings, *, sources: bool = False, diff_defaults: bool = False) -> str:
    """Render the config as YAML.

    Args:
        sources: a comment on each line says where the value comes from and what the default is.
        diff_defaults: only keys whose value is not the default.
    """
    lines: list[str] = []
    for section in ("", *SECTIONS):
        prefix = section + "." if section else ""
        keys = [p for p in all_paths() if p.rpartition(".")[0] == section]
        body = [
            _line(settings, path, path.removeprefix(prefix), sources)
            for path in keys
            if not diff_defaults or _value(settings, path) != _default(path)
        ]
        if body and section:
            lines.append(f"{section}:")
        lines += [("  " if section else "") + line for line in body]
    return "\n".join(lines or ["{}"]) + "\n"


def render_config_json(
    settings: Settings, *, sources: bool = False, diff_defaults: bool = False
) -> str:
    """Render the config as JSON on one line; `sources` is a second object with the same keys."""
    shown = [p for p in all_paths() if not diff_defaults or _value(settings, p) != _default(p)]
    document = {
        "schema_version": 1,
        "kind": "config",
        "config": _nested({path: _json_value(settings, path) for path in shown}),
    }
    if sources:
        document["sources"] = _nested({path: describe_source(settings, path) for path in shown})
    return json.dumps(document, allow_nan=False) + "\n"


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        section, _, key = path.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[key] = value
    return tree


def _json_value(settings: Settings, path: str) -> Any:
    value = _value(settings, path)
    return "auto" if value is None and accepts_auto(path) else value


def shown_value(settings: Settings, path: str) -> str:
    """Write a key's value in force as YAML on one line."""
    return _yaml(path, _value(settings, path))


def describe_source(settings: Settings, path: str) -> str:
    """Say where a value comes from, how it was written, and the default where that is another value."""
    source = settings.source(path)
    entry = settings.entries.get(path)
    if entry is not None and entry.written is not None:
        source += f", written {entry.written}"
    if _value(settings, path) != _default(path):
        source += f" (default {_yaml(path, _default(path))})"
    return source


def _line(settings: Settings, path: str, key: str, sources: bool) -> str:
    text = f"{key}: {shown_value(settings, path)}"
    return f"{text}  # {describe_source(settings, path)}" if sources else text


def _value(settings: Settings, path: str) -> Any:
    return settings.model if path == "model" else settings.resolved(path)


def _default(path: str) -> Any:
    return default_of(path) if not path.startswith("sampling.") else Settings({}).resolved(path)


def _yaml(path: str, value: Any) -> str:
    return "auto" if value is None and accepts_auto(path) else dump_value(value)
