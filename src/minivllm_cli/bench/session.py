"""A run of `bench`: engines one after the other, rows out as they finish, and the end of it."""

from contextlib import closing
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from minivllm_cli import engine as engine_factory
from minivllm_cli.batch.verify import Verifier, VerifyCounts, verify_document, verify_text
from minivllm_cli.bench.document import (
    GpuWatch,
    device_document,
    model_document,
    new_document,
)
from minivllm_cli.bench.flags import BenchFlags
from minivllm_cli.bench.measuring import Measurer, verify_workload
from minivllm_cli.bench.plan import BenchPlan, EngineRun, make_plan
from minivllm_cli.bench.preflight import check_lines
from minivllm_cli.bench.requests import BenchRequest, make_repetition, read_lines
from minivllm_cli.bench.rows import (
    DeviceLimit,
    Measured,
    pair_document,
    row_document,
    row_warnings,
)
from minivllm_cli.bench.variant import Variant
from minivllm_cli.bench.workload import Workload
from minivllm_cli.bench.writer import ResultWriter
from minivllm_cli.cache_dump.watch import cache_watch
from minivllm_cli.command import Invocation
from minivllm_cli.config.settings import Settings
from minivllm_cli.console.progress import Progress, loading_progress, make_reporter
from minivllm_cli.console.streams import claim_stdout
from minivllm_cli.errors import CliError, ExitCode, OutputFailed, Problem
from minivllm_cli.files.atomic_file import write_atomic
from minivllm_cli.files.output_target import check_side_file
from minivllm_engine.core.errors import EngineError
from minivllm_engine.core.units import count_text
from minivllm_engine.protocol.strict_json import dump_line

if TYPE_CHECKING:
    from minivllm_engine.llm import LLM


def run_bench(run: Invocation, settings: Settings, flags: BenchFlags) -> int:
    """Measure. Returns the exit code.

    Raises:
        CliError, EngineError: the run cannot be begun, or the engine failed in it.
    """
    kind, _, file = (settings.bench.workload or "").partition(":")
    lines = {"--workload": Path(file) if kind == "jsonl" else None}
    check_side_file("--save", flags.save, "bench.json", lines | {"--cache-dump": flags.cache_dump})
    if flags.save is not None and flags.save.is_file() and not flags.overwrite:
        raise CliError(f"{flags.save} exists", hint="--overwrite, or --save with another name")
    check_side_file("--cache-dump", flags.cache_dump, "cache.json", lines | {"--save": flags.save})
    run.interrupts.activity = "looking at the model"
    plan = make_plan(settings, flags, run.console)
    for text in plan.skipped:
        run.console.warn(text)
    return _Session(run, plan, flags).run()


class _Session:
    def __init__(self, run: Invocation, plan: BenchPlan, flags: BenchFlags) -> None:
        self._console, self._interrupts = run.console, run.interrupts
        self._plan, self._flags = plan, flags
        prepared = plan.prepared
        self._lines = self._read_lines()
        check_lines(flags, prepared, self._lines)
        self._check_verify()
        self._device = prepared.config.engine.device
        self._gpu = GpuWatch() if self._device == "cuda" else GpuWatch(None)
        shape = None if flags.shape is None else str(flags.shape)
        model = model_document(plan.settings.model, prepared.path, shape)
        self._document = new_document(plan.settings, model)
        results = claim_stdout()
        self._writer = ResultWriter(results, run.console, flags.output_format, plan.percents)
        self._reporter = make_reporter(plan.settings.output.progress, run.console)
        self._progress = Progress("bench", 0, plan.num_rows * (plan.reps + plan.warmup))
        self._measurer = Measurer(plan.reps, plan.warmup, self._between, self._on_sample)
        self._watch = cache_watch(flags.cache_dump, "bench", plan.settings, prepared, run.console)
        self._first: dict[Workload, Measured] = {}
        self._verify = VerifyCounts()
        self._limit: DeviceLimit | None = None
        self._begun = False
        self._stopped = False
        self._saved = False

    def run(self) -> int:
        """Do everything; return the exit code."""
        with closing(self._reporter), self._watch.checked(), self._watch.answering_signals():
            try:
                self._measure()
            except KeyboardInterrupt:
                self._end(complete=False)
                done, total = len(self._document["rows"]), self._plan.num_rows
                rows = "1 row was" if total == 1 else f"{total} rows were"
                where = f" and are in {self._flags.save}" if self._saved else ""
                self._console.write_line(f"{done} of {rows} finished{where}")
                return self._interrupts.exit_code
            except (CliError, EngineError):
                self._end(complete=False)
                raise
            self._end(complete=True)
        return self._verdict()

    def _measure(self) -> None:
        self._interrupts.activity = "measuring the memory's speed"
        bandwidth = engine_factory.read_bandwidth(self._device)
        prepared = self._plan.prepared
        self._limit = DeviceLimit(prepared, bandwidth)
        self._document["device"] = device_document(prepared, bandwidth)
        for engine in self._plan.engines:
            self._run_engine(engine)

    def _run_engine(self, engine: EngineRun) -> None:
        self._interrupts.activity = "loading the model"
        self._reporter.update(Progress("loading", detail=self._document["model"]["name"]))
        loading = loading_progress(self._reporter, self._interrupts)
        with self._interrupts.deferred(), loading as show:
            llm = engine_factory.open_engine(engine.prepared, show)
        with llm, self._watch.over(llm), self._interrupts.stopping_with(self._on_signal):
            self._interrupts.check()
            self._document["load"] = asdict(llm.load_report)  # of several engines, the last
            if not self._begun:
                self._begun = True
                self._reporter.close()
                self._writer.begin(self._document, self._plan.reps, self._plan.warmup)
            for workload, variants in engine.cases:
                self._warn_of_batch(llm, workload, variants)
                self._run_case(llm, workload, variants)

    def _run_case(self, llm: "LLM", workload: Workload, variants: tuple[Variant, ...]) -> None:
        lines = self._lines.get(workload, [])
        measured = self._measurer.measure(llm, workload, variants, lines)
        assert self._limit is not None
        rows = [row_document(one, self._plan.percents, self._limit) for one in measured]
        warnings = [
            text for m, r in zip(measured, rows, strict=True) for text in row_warnings(m, r)
        ]
        warnings += self._gpu.after_row()
        # The first variant of a workload may have run on an earlier engine.
        first = self._first.setdefault(workload, measured[0])
        pairs = [pair_document(first, one) for one in measured if one is not first]
        self._document["rows"] += rows
        self._document["equal"] += pairs
        self._document["warnings"] += warnings
        self._document["gpu_state"] = self._gpu.document()
        self._reporter.close()  # rows and the bar may share a terminal
        self._writer.rows(rows)
        self._writer.pairs(pairs)
        for text in warnings:
            self._console.warn(text)
        # Whatever ends the run, the rows so far are on disk.
        self._save()
        if self._flags.verify is not None and workload.reuses_prefixes:
            verifier = Verifier(llm, self._flags.verify, self._console, self._verify)
            repetition = make_repetition(workload, 0, llm.model_config.vocab_size, lines)
            verify_workload(llm, verifier, workload, repetition, self._between)

    def _warn_of_batch(self, llm: "LLM", workload: Workload, variants: tuple[Variant, ...]) -> None:
        most = self._num_requests(workload)
        if workload.batch > most:
            run = "1 request runs" if most == 1 else f"{most} requests run"
            self._console.warn(f"batch {workload.batch}: no more than {run} at once")
        largest = max(llm.graph_sizes, default=0)
        if any(variant.graph for variant in variants) and workload.batch > largest:
            self._console.warn(
                f"batch {workload.batch} is above the largest graph ({largest}): its steps run eagerly",
                hint=f"--set graph.max_batch={workload.batch}",
            )

    def _read_lines(self) -> dict[Workload, list[BenchRequest]]:
        prepared, settings = self._plan.prepared, self._plan.settings
        settings = settings.with_model_sampling(prepared.generation_config.sampling)

        @cache  # one file has the lines of all rows, and a pipe can be read once
        def read(file: str, most: int) -> list[BenchRequest]:
            return read_lines(file, most, settings, prepared, self._console)

        return {
            workload: read(workload.file, workload.num_prompts)
            for engine in self._plan.engines
            for workload, _ in engine.cases
            if workload.file is not None
        }

    def _num_requests(self, workload: Workload) -> int:
        return len(self._lines[workload]) if workload in self._lines else workload.num_prompts

    def _check_verify(self) -> None:
        every = self._flags.verify
        if every is None:
            return
        cases = [workload for engine in self._plan.engines for workload, _ in engine.cases]
        most = sum(self._num_requests(one) for one in cases if one.reuses_prefixes)
        if every > most:
            raise CliError(
                f"--verify {every} has nothing to do: {count_text(most, 'request')} can reuse a prefix",
                hint="--verify 1",
            )

    def _on_sample(self, variant: str, what: str) -> None:
        self._progress.detail = f"{variant} {what}"
        self._reporter.update(self._progress)
        self._progress.done += 1

    def _on_signal(self, count: int) -> None:
        if count > 1:
            self._interrupts.limit_clean_up(0)
            raise KeyboardInterrupt
        self._interrupts.limit_clean_up()
        self._stopped = True
        self._console.write_line("stopping: finished rows are kept. Ctrl-C again to leave at once.")

    def _between(self) -> None:
        if self._stopped:
            raise KeyboardInterrupt
        self._watch.poll()

    def _end(self, *, complete: bool) -> None:
        """What follows the rows, and the file; nothing where nothing was measured."""
        self._reporter.close()
        if not self._document["rows"]:
            return
        if self._flags.verify is not None:
            self._document["verify"] = verify_document(self._verify)
        self._document["complete"] = complete
        plan = self._plan.prepared.plan
        self._writer.end(self._document, plan.block_bytes // plan.block_size)
        if self._flags.verify is not None:
            self._console.note(f"verify: {verify_text(self._verify)}")
        self._save()

    def _save(self) -> None:
        if self._flags.save is None:
            return
        try:
            write_atomic(self._flags.save, dump_line(self._document))
        except OSError as error:
            raise OutputFailed(
                f"cannot write {self._flags.save}: {error.strerror or error}"
            ) from None
        self._saved = True

    def _verdict(self) -> ExitCode:
        verify, every = self._verify, self._flags.verify
        failed = verify.different > 0
        if every is not None and not verify.replayed:
            failed = True
            reused = count_text(verify.reused, "request")
            hint = "--verify 1" if verify.reused else None
            self._console.error(
                Problem(
                    f"--verify {every} replayed nothing", why=f"{reused} reused a prefix", hint=hint
                )
            )
        unequal = [pair for pair in self._document["equal"] if pair["equal"] != pair["of"]]
        if self._flags.strict_equal and unequal:
            failed = True
            first = unequal[0]
            base, other = first["variants"]
            self._console.error(
                Problem(
                    f"{base} and {other} gave other tokens (--strict-equal)",
                    why=f"equal: {first['equal']} of {count_text(first['of'], 'request')} in "
                    f"{first['workload']['kind']} batch {first['workload']['batch']}",
                )
            )
        return ExitCode.CHECK_FAILED if failed else ExitCode.OK
