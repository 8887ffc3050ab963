"""A run of `bench`: engines one after the other, rows out as they finish, and the end of it."""

import hashlib
import json
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm_cli import engine as engine_factory
from minivllm_cli.batch.verify import Verifier, VerifyCounts, verify_document, verify_text
from minivllm_cli.bench.document import ResultDocument
from minivllm_cli.bench.file_lines import read_lines
from minivllm_cli.bench.flags import BenchFlags
from minivllm_cli.bench.gpu_state import GpuWatch
from minivllm_cli.bench.measuring import Measurer
from minivllm_cli.bench.pairs import pair_document
from minivllm_cli.bench.plan import BenchPlan, EngineRun, make_plan
from minivllm_cli.bench.preflight import check_lines
from minivllm_cli.bench.requests import BenchRequest, make_repetition
from minivllm_cli.bench.row import DeviceLimit, Measured, row_document, row_warnings
from minivllm_cli.bench.variant import Variant
from minivllm_cli.bench.verifying import verify_workload
from minivllm_cli.bench.workload import Workload
from minivllm_cli.bench.writer import ResultWriter
from minivllm_cli.cache_dump.watch import cache_watch
from minivllm_cli.command import Invocation
from minivllm_cli.config.settings import Settings
from minivllm_cli.console.progress import Progress, loading_progress, make_reporter
from minivllm_cli.console.streams import claim_stdout
from minivllm_cli.errors import CliError, ExitCode, OutputFailed, Problem
from minivllm_cli.files.fingerprint import model_hash
from minivllm_cli.files.output_target import check_side_file
from minivllm_engine.core.atomic_file import write_atomic
from minivllm_engine.core.units import count_text
from minivllm_engine.protocol.strict_json import dump_line

if TYPE_CHECKING:
    from minivllm_engine.llm import LLM


def run_bench(run: Invocation, settings: Settings, flags: BenchFlags) -> int:
    """Measure. Returns the exit code.

    Raises:
        CliError, EngineError: the run cannot be begun, or the engine failed in it.
    """
    others = {"--cache-dump": flags.cache_dump}
    check_side_file("--save", flags.save, "bench.json", others)
    if flags.save is not None and flags.save.is_file() and not flags.overwrite:
        raise CliError(f"{flags.save} exists", hint="--overwrite, or --save with another name")
    check_side_file("--cache-dump", flags.cache_dump, "cache.json", {"--save": flags.save})
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
        self._device = prepared.config.engine.device
        self._gpu = GpuWatch() if self._device == "cuda" else GpuWatch(None)
        self._document = ResultDocument(sys.argv[1:], plan.settings, _model(plan, flags))
        self._results = claim_stdout()
        self._writer = ResultWriter(self._results, run.console, flags.output_format, plan.percents)
        self._reporter = make_reporter(plan.settings.output.progress, run.console)
        self._progress = Progress("bench", 0, plan.num_samples)
        self._measurer = Measurer(plan.times, self._between, self._on_sample)
        self._watch = cache_watch(flags.cache_dump, "bench", plan.settings, prepared, run.console)
        self._first: dict[str, Measured] = {}
        self._verify = VerifyCounts()
        self._limit: DeviceLimit | None = None
        self._begun = False
        self._stopped = False
        self._saved = False

    def run(self) -> int:
        """Everything; the exit code."""
        with closing(self._reporter), self._watch.checked(), self._watch.answering_signals():
            try:
                self._measure()
            except KeyboardInterrupt:
                self._end(complete=False)
                done, total = len(self._document.rows), self._num_rows
                rows = "1 row was" if total == 1 else f"{total} rows were"
                self._console.write_line(f"{done} of {rows} finished{self._where()}")
                return self._interrupts.exit_code
            except CliError:
                self._end(complete=False)
                raise
            self._end(complete=True)
        return self._verdict()

    @property
    def _num_rows(self) -> int:
        return sum(len(variants) for engine in self._plan.engines for _, variants in engine.cases)

    def _where(self) -> str:
        return f" and are in {self._flags.save}" if self._saved else ""

    def _measure(self) -> None:
        self._interrupts.activity = "measuring the memory's speed"
        bandwidth = engine_factory.read_bandwidth(self._device)
        prepared = self._plan.prepared
        plan = prepared.plan
        tied = prepared.index.seems_tied(prepared.model_config)
        self._limit = DeviceLimit(
            prepared.model_config, plan.dtype, plan.state_dtype, tied, bandwidth
        )
        threads = engine_factory.num_threads() if self._device == "cpu" else None
        self._document.set_device(prepared, bandwidth, threads)
        for engine in self._plan.engines:
            self._run_engine(engine)

    def _run_engine(self, engine: EngineRun) -> None:
        self._interrupts.activity = "loading the model"
        self._reporter.update(Progress("loading", detail=self._document.head["model"]["name"]))
        loading = loading_progress(self._reporter, self._interrupts)
        with self._interrupts.deferred(), loading as show:
            llm = engine_factory.open_engine(engine.prepared, show)
        with llm, self._watch.over(llm), self._interrupts.stopping_with(self._on_signal):
            self._interrupts.check()
            self._document.set_load(llm.load_report)
            if not self._begun:
                self._begun = True
                self._reporter.close()
                self._writer.begin(
                    self._document.head, self._plan.times.reps, self._plan.times.warmup
                )
            for workload, variants in engine.cases:
                self._warn_of_large_batch(llm, workload, variants)
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
        pairs = [pair for one in measured if (pair := self._pair(one)) is not None]
        self._document.rows += rows
        self._document.pairs += pairs
        self._document.warnings += warnings
        self._reporter.close()  # rows and the bar may share a terminal
        self._writer.rows(workload, rows)
        self._writer.pairs(pairs)
        for text in warnings:
            self._console.warn(text)
        # Whatever ends the run, the rows so far are on disk.
        self._save(self._document.finished(self._gpu.document(), complete=False))
        if self._flags.verify is not None and workload.reuses_prefixes:
            verifier = Verifier(llm, self._flags.verify, self._console, self._verify)
            repetition = make_repetition(workload, 0, llm.model_config.vocab_size, lines)
            verify_workload(llm, verifier, workload, repetition, self._between)

    def _pair(self, measured: Measured) -> dict[str, object] | None:
        """An variant beside the first of its workload, which may have run on an earlier engine."""
        key = json.dumps(measured.workload.document())
        first = self._first.setdefault(key, measured)
        if first is measured:
            return None
        return pair_document(
            measured.workload,
            (first.variant, first.samples),
            (measured.variant, measured.samples),
        )

    def _warn_of_large_batch(
        self, llm: "LLM", workload: Workload, variants: tuple[Variant, ...]
    ) -> None:
        largest = max(llm.graph_sizes, default=0)
        if any(variant.graph for variant in variants) and workload.batch > largest:
            self._console.warn(
                f"batch {workload.batch} is above the largest graph ({largest}): its steps run eagerly",
                hint=f"--set graph.max_batch={workload.batch}",
            )

    def _read_lines(self) -> dict[Workload, list[BenchRequest]]:
        prepared, settings = self._plan.prepared, self._plan.settings
        settings = settings.with_model_sampling(prepared.generation_config.sampling)
        return {
            workload: read_lines(
                workload.file,
                workload.num_prompts,
                settings,
                prepared.tokenizer,
                prepared.plan.max_model_len,
                self._console,
            )
            for engine in self._plan.engines
            for workload, _ in engine.cases
            if workload.file is not None
        }

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
        if not self._document.rows:
            return
        if self._flags.verify is not None:
            self._document.add_verify(verify_document(self._verify))
        document = self._document.finished(self._gpu.document(), complete=complete)
        plan = self._plan.prepared.plan
        self._writer.end(document, plan.block_bytes // plan.block_size)
        if self._flags.verify is not None:
            self._console.note(f"verify: {verify_text(self._verify)}")
        self._save(document)

    def _save(self, document: dict[str, Any]) -> None:
        if self._flags.save is None:
            return
        try:
            write_atomic(self._flags.save, dump_line(document))
        except OSError as error:
            raise OutputFailed(
                f"cannot write {self._flags.save}: {error.strerror or error}"
            ) from None
        self._saved = True

    def _verdict(self) -> ExitCode:
        failed = self._verify.different > 0
        unequal = [pair for pair in self._document.pairs if pair["equal"] != pair["of"]]
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


def _model(plan: BenchPlan, flags: BenchFlags) -> dict[str, str]:
    prepared = plan.prepared
    if flags.shape is None:
        name = plan.settings.model
        return {
            "name": name if name == "demo" else Path(name).resolve().name,
            "hash": model_hash(prepared.path),
        }
    from minivllm_engine.model_config.shapes import shape_config

    content = json.dumps([shape_config(str(flags.shape)), "random"], sort_keys=True)
    digest = hashlib.sha256(content.encode()).hexdigest()
    return {"name": f"{flags.shape} random", "hash": f"sha256:{digest}"}
