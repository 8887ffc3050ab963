"""A document on the streams: text for people, or with `--json` the document itself."""

from collections.abc import Callable
from typing import Any

from minivllm_cli.console.streams import Console
from minivllm_cli.inspect_cache.report import render_report
from minivllm_cli.inspect_cache.table import render_table
from minivllm_cli.inspect_cache.tree import TreeOptions, select
from minivllm_engine.protocol.strict_json import dump_line


def render_document(document: dict[str, Any], options: TreeOptions) -> str:
    """The plan, and what was used of it if that is known."""
    text = render_table(document)
    return text if document["hit"] is None else f"{text}\n{render_report(document, options)}"


def show_document(
    document: dict[str, Any],
    options: TreeOptions,
    write: Callable[[str], None],
    console: Console,
    *,
    as_json: bool,
) -> None:
    """Write a document with `write`, which is stdout. Under -q that is the hashes of its segments.

    Raises:
        OutputClosed, OutputFailed: stdout takes no more.
    """
    if as_json:
        write(dump_line(document).decode())
        for line in render_document(document, options).splitlines():
            console.note(line)
    elif console.quiet:
        write("".join(f"{node['hash']}\n" for node in select(document["nodes"], options)))
    else:
        write(render_document(document, options))
