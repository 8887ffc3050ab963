"""The view `run`: the requests of a file are run, and what they did to the cache is shown."""

from contextlib import ExitStack
from typing import Any

from minivllm_cli.command import Invocation
from minivllm_cli.console import claim_stdout
from minivllm_cli.generate.batch import answer_jobs, check_batch, scan_input
from minivllm_cli.generate.flags import GenerateFlags
from minivllm_cli.generate.overrides import Overrides
from minivllm_cli.generate.report import report_end
from minivllm_cli.inspect_cache.live_document import LiveDocument
from minivllm_cli.inspect_cache.tree import TreeOptions
from minivllm_cli.inspect_cache.view import show_document
from minivllm_cli.inspect_cache.watch import CacheWatch
from minivllm_cli.settings import Settings


class _Nowhere:
    """A sink: answers are not what is asked for."""

    def put(self, position: int, index: int, key: str, record: dict[str, Any]) -> None:
        """Drop the record."""

    def finish(self) -> None:
        """Nothing to do."""

    def stop(self) -> None:
        """Nothing to do."""


def show_run(
    run: Invocation, settings: Settings, source: str, options: TreeOptions, *, as_json: bool
) -> int:
    """Run the requests in `source`, show the document on stdout. Returns the exit code of `generate`.

    A signal ends the run early, and what is known by then is shown.

    Raises:
        CliError, EngineError: the run cannot be begun, or could not be finished.
    """
    flags, overrides = GenerateFlags(input=source), Overrides(None, {}, {})
    with ExitStack() as stack:
        batch = check_batch(run, settings, flags, overrides, stack)
        assert batch.prepared is not None
        scan = scan_input(batch, None)
        live = LiveDocument("run", settings, batch.prepared, with_text=options.with_text)
        watch = CacheWatch(live, None, run.console)
        results = claim_stdout()
        try:
            finished = answer_jobs(batch, scan, None, _Nowhere(), watch)
        except KeyboardInterrupt:
            finished = False
        document = live.planned() if watch.last is None else watch.last
        show_document(document, options, results.write_text, run.console, as_json=as_json)
        if not finished:
            done, total = batch.tally.num_records, scan.total
            run.console.write_line(f"{done:,}/{total:,} requests were run")
            return run.interrupts.exit_code
        advice = batch.remedies.for_waiting(batch.tally)
        return report_end(run.console, batch.tally, scan, flags, batch.source.source, advice)
