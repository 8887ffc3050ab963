"""A saved dump, read back and shown as it was: no model, no torch."""

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from minivllm_cli.command import Invocation
from minivllm_cli.console.streams import print_result
from minivllm_cli.errors import CliError, ExitCode
from minivllm_cli.inspect_cache.dump_schema import Document, as_document
from minivllm_cli.inspect_cache.tree import TreeOptions
from minivllm_cli.inspect_cache.view import show_document
from minivllm_engine.core.units import format_size
from minivllm_engine.protocol.strict_json import BadJson, parse_object

MOST_BYTES = 64 << 20
_MAKES_ONE = "minivllm generate --input FILE --cache-dump DUMP writes one"


def show_dump(run: Invocation, path: Path, options: TreeOptions, *, as_json: bool) -> int:
    """Print a dump on stdout.

    Raises:
        CliError: it cannot be read, is none, or lacks what was asked for.
    """
    document = read_dump(path)
    if options.with_text and any("text" not in node for node in document["nodes"]):
        raise CliError(
            f"--show-text: {path} holds no text, only counts and hashes",
            hint="minivllm inspect-cache run --input FILE --show-text",
        )
    show_document(document, options, print_result, run.console, as_json=as_json)
    return ExitCode.OK


def read_dump(path: Path) -> dict[str, Any]:
    """Read the document in a file, and check it.

    Raises:
        CliError: the file cannot be read, is too large, or holds something else.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise CliError(f"cannot read {path}: {error.strerror or error}") from None
    if len(data) > MOST_BYTES:
        raise CliError(f"{path} is no cache dump: larger than {format_size(MOST_BYTES)}")
    try:
        found = parse_object(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _none(path, f"not UTF-8 (byte {error.start:,})") from None
    except BadJson as error:
        raise _none(path, f"{error.message}, at character {error.column:,}") from None
    version = found.get("schema_version")
    if found.get("kind") == "cache" and isinstance(version, int) and version != 1:
        raise CliError(f"{path} has schema_version {version}", why="this minivllm reads version 1")
    try:
        return as_document(Document.model_validate(found))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])[:100]
        message = first["msg"].removeprefix("Value error, ")
        raise _none(path, f"{place}: {message}" if place else message) from None


def _none(path: Path, why: str) -> CliError:
    return CliError(f"{path} is no cache dump", why=why, hint=_MAKES_ONE)
