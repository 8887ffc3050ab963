"""Progress of a conversion: what the engine reports, with rate and time left, for a reporter to show."""

from collections.abc import Iterator
from contextlib import contextmanager

from minivllm_cli.command import Invocation
from minivllm_cli.config.settings import Settings
from minivllm_cli.console.progress import Progress, RateMeter, Reporter, make_reporter
from minivllm_engine.conversion.report import Progress as EngineProgress

_MIN_SECONDS = 0.5


class ConversionProgress:
    """Called by the engine after every tensor. Raises KeyboardInterrupt once a signal came."""

    def __init__(self, run: Invocation, reporter: Reporter) -> None:
        self._run = run
        self._reporter = reporter
        self._phase = ""
        self._meter = RateMeter()

    def __call__(self, now: EngineProgress) -> None:
        self._run.interrupts.check()
        if now.phase != self._phase:
            self._phase, self._meter = now.phase, RateMeter()
        self._meter.add(now.done_bytes, 0)
        rate = self._meter.rates()[0]
        left = now.total_bytes - now.done_bytes
        # A rate over less than that says little about what is to come.
        known = rate > 0 and self._meter.seconds >= _MIN_SECONDS
        self._reporter.update(
            Progress(
                now.phase,
                now.done_bytes,
                now.total_bytes,
                detail=f"shard {now.shard}/{now.num_shards}",
                bytes_s=rate,
                eta_s=left / rate if known else None,
            )
        )


@contextmanager
def conversion_progress(run: Invocation, settings: Settings) -> Iterator[ConversionProgress]:
    """Progress in the style that was chosen, from the loading of torch on.

    The terminal is as it was afterwards.
    """
    reporter = make_reporter(settings.output.progress, run.console)
    try:
        reporter.update(Progress("loading", detail="torch"))
        yield ConversionProgress(run, reporter)
    finally:
        reporter.close()
