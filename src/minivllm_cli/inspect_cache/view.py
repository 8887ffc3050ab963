"""A document on the streams: text for people, or with `--json` the document itself."""

from collections.abc import Callable
from typing import Any

from minivllm_cli.console.streams import Console
from minivllm_cli.inspect_cache.report import render_report
from minivllm_cli.inspect_cache.table import render_table
from minivllm_cli.inspect_cache.tree import TreeOptions, select
from minivllm_engine.protocol.strict_json import dump_line


def render_document(document: dict[str, Any], options: TreeOptions, *, with_plan: bool) -> str:
    """Render what was used of a cache, or the plan if that is all there is.

    Args:
        with_plan: the plan stands above what was used of it.
    """
    if document["hit"] is None:
        return render_table(document)
    report = render_report(document, options)
    return f"{render_table(document)}\n{report}" if with_plan else report


def show_document(
    document: dict[str, Any],
    options: TreeOptions,
    write: Callable[[str], None],
    console: Console,
    *,
    as_json: bool,
) -> None:
    """Write a document with `write`, which is stdout. Under -q that is the hashes of its segments, under -v
    the plan comes first.

    Raises:
        OutputClosed, OutputFailed: stdout takes no more.
    """
    if as_json:
        write(dump_line(document).decode())
        text = render_document(document, options, with_plan=console.verbosity > 0)
        for line in text.splitlines():
            console.note(line)
    elif console.quiet:
        write("".join(f"{node['hash']}\n" for node in select(document["nodes"], options)))
    else:
        write(render_document(document, options, with_plan=console.verbosity > 0))
