"""The view `run`: the requests of a file are run, and what they did to the cache is shown."""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minivllm_cli.batch.flags import GenerateFlags
from minivllm_cli.batch.prompts import Overrides
from minivllm_cli.batch.report import report_end
from minivllm_cli.batch.run import answer_jobs, check_batch, scan_input
from minivllm_cli.cache_dump.live_document import LiveDocument
from minivllm_cli.cache_dump.watch import CacheWatch
from minivllm_cli.command import Invocation
from minivllm_cli.config.settings import Settings
from minivllm_cli.console.streams import Results, claim_stdout
from minivllm_cli.inspect_cache.solve import (
    Recalibration,
    check_has_graphs,
    recalibrate,
)
from minivllm_cli.inspect_cache.tree import TreeOptions
from minivllm_cli.inspect_cache.view import render_document, show_document
from minivllm_engine.core.errors import CapacityError

if TYPE_CHECKING:
    from minivllm_cli.inspect_cache.flags import InspectFlags


class _Nowhere:
    """A sink: answers are not what is asked for."""

    def put(self, position: int, index: int, key: str, record: dict[str, Any]) -> None:
        """Drop the record."""

    def finish(self) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Do nothing."""


def show_run(
    run: Invocation,
    settings: Settings,
    flags: "InspectFlags",
    options: TreeOptions,
) -> int:
    """Run the requests of `--input`, show the document on stdout. Returns the exit code of `generate`.

    With `--recalibrate` stdout gets its YAML, and the document moves to stderr. A signal ends the run
    early, and what is known by then is shown.

    Raises:
        CliError, EngineError: the run cannot be begun, or could not be finished.
        CapacityError: the graph reserve was too small; the document is shown before.
    """
    generate, overrides = GenerateFlags(input=flags.input), Overrides(None, {}, {})
    with ExitStack() as stack:
        batch = check_batch(run, settings, generate, overrides, stack)
        assert batch.prepared is not None
        if flags.recalibrate:
            check_has_graphs(batch.prepared.plan)
        scan = scan_input(batch, None)
        live = LiveDocument("run", settings, batch.prepared, with_text=options.with_text)
        watch = CacheWatch(live, None, run.console)
        results = claim_stdout()
        try:
            finished = answer_jobs(batch, scan, None, _Nowhere(), watch)
        except KeyboardInterrupt:
            finished = False
        shown = _Shown(run, results, options, flags.json_)
        document = live.planned() if watch.last is None else watch.last
        if flags.recalibrate and live.load_report is not None:
            plan, config = batch.prepared.plan, settings.engine_config
            try:
                found = recalibrate(live.load_report, plan, config, live.planner)
            except CapacityError:
                shown.document(document)
                raise
            shown.recalibration(document, found)
        else:
            shown.document(document)
        if not finished:
            done, total = batch.tally.num_records, scan.total
            run.console.write_line(f"{done:,}/{total:,} requests were run")
            return run.interrupts.exit_code
        advice = batch.remedies.for_waiting(batch.tally)
        return report_end(run.console, batch.tally, scan, generate, batch.source.source, advice)


@dataclass(frozen=True)
class _Shown:
    """Where the view goes."""

    run: Invocation
    results: Results
    options: TreeOptions
    as_json: bool

    def document(self, document: dict[str, Any]) -> None:
        write, console = self.results.write_text, self.run.console
        show_document(document, self.options, write, console, as_json=self.as_json)

    def recalibration(self, document: dict[str, Any], found: Recalibration) -> None:
        if self.as_json:
            self.document({**document, "recalibration": found.document()})
            return
        for line in render_document(document, self.options, with_plan=True).splitlines():
            self.run.console.note(line)
        self.results.write_text(found.yaml())
