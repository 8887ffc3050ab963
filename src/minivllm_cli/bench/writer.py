"""Results on their way out: each row on stdout as soon as it is finished, in the format asked for."""

from collections.abc import Sequence
from typing import Any

from minivllm_cli.bench.flags import Format
from minivllm_cli.bench.formats import csv_head, csv_line, md_head, md_line
from minivllm_cli.bench.table import RowTable, graphs_line, head_lines, pair_line
from minivllm_cli.bench.workload import Workload
from minivllm_cli.console.streams import Console, Results
from minivllm_engine.protocol.strict_json import dump_line


class ResultWriter:
    """Writes to stdout. With `--format json` the table goes to stderr, and the document to stdout at the
    end."""

    def __init__(
        self, results: Results, console: Console, output: Format, percents: Sequence[float]
    ) -> None:
        self._results, self._console = results, console
        self._format, self._percents = output, percents
        self._title: str | None = None
        self._table: RowTable | None = None

    def begin(self, head: dict[str, Any], reps: int, warmup: int) -> None:
        """What comes before the first row."""
        if self._format in (Format.TABLE, Format.JSON):
            self._lines(head_lines(head, reps, warmup))
        elif self._format is Format.CSV:
            self._results.write_text(csv_head(self._percents))
        elif self._format is Format.MD:
            self._results.write_text(md_head(self._percents))

    def rows(self, workload: Workload, rows: Sequence[dict[str, Any]]) -> None:
        """The rows of a workload."""
        if self._format in (Format.TABLE, Format.JSON):
            self._table_rows(workload, rows)
            return
        for row in rows:
            if self._format is Format.CSV:
                self._results.write_text(csv_line(row, self._percents))
            elif self._format is Format.MD:
                self._results.write_text(md_line(row, workload.title, self._percents))
            else:
                self._results.write(dump_line({"schema_version": 1, "kind": "bench-row", **row}))

    def pairs(self, pairs: Sequence[dict[str, Any]]) -> None:
        """Arms beside each other."""
        if self._format in (Format.TABLE, Format.JSON):
            self._lines([pair_line(pair) for pair in pairs])
        elif self._format is Format.JSONL:
            for pair in pairs:
                self._results.write(dump_line({"schema_version": 1, "kind": "bench-pair", **pair}))

    def end(self, document: dict[str, Any], kv_token_bytes: int) -> None:
        """What comes after the last row."""
        if self._format in (Format.TABLE, Format.JSON):
            line = graphs_line(document["load"], document["rows"], kv_token_bytes)
            self._lines([] if line is None else ["", line])
        if self._format is Format.JSON:
            self._results.write(dump_line(document))

    def _table_rows(self, workload: Workload, rows: Sequence[dict[str, Any]]) -> None:
        if self._table is None or workload.title != self._title:
            self._title = workload.title
            variants = [row["variant"] for row in rows]
            if workload.kind == "stages":  # whose variants come one engine after the other
                variants.append("kv cache")
            self._table = RowTable(workload.title, workload.kind, variants, self._percents)
            self._lines(self._table.head())
        self._lines([self._table.line(row) for row in rows])

    def _lines(self, lines: Sequence[str]) -> None:
        text = "".join(f"{line}\n" for line in lines)
        if self._format is Format.TABLE:
            self._results.write_text(text)
        else:
            for line in text.splitlines():
                self._console.note(line)
