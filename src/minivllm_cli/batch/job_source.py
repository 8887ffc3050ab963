"""The lines of an input as jobs: selected, with the sampling in force and the journal key of each."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from minivllm_cli.batch.flags import GenerateFlags
from minivllm_cli.batch.scan import Scan, Selection
from minivllm_cli.batch.tally import Tally
from minivllm_cli.config.settings import Settings
from minivllm_cli.files.fingerprint import line_key
from minivllm_cli.files.input_file import InputFile
from minivllm_cli.files.journal import Journal
from minivllm_engine.protocol.line_parser import LineParser
from minivllm_engine.protocol.lines import BadLine, Job, Line, RequestLine

_BAD_LINE_KEY = "0" * 32


@dataclass(frozen=True)
class JobSource:
    """Reads the same jobs in every pass, one at a time."""

    source: InputFile | None
    selection: Selection
    flags: GenerateFlags
    settings: Settings
    make_parser: Callable[[], LineParser]
    think: bool | None
    single: RequestLine | None = None

    def jobs(self) -> Iterator[Job]:
        """All selected lines, good and bad."""
        for position, line in enumerate(self.selection.pick(self._lines())):
            if isinstance(line, BadLine):
                yield Job(position, line, _BAD_LINE_KEY)
                continue
            params = self.settings.sampling(line.params, index=line.index)
            flags = self.flags
            key = line_key(
                line,
                params,
                think=self.think,
                template=flags.chat_template_for_prompts,
                truncate=flags.truncate,
                strip=flags.strip_thinking,
            )
            yield Job(position, line, key, params)

    def jobs_left(self, journal: Journal | None) -> Iterator[Job]:
        """Jobs that `journal` does not hold an answer for."""
        for job in self.jobs():
            if journal is None or not journal.is_done(job.line.index, job.key):
                yield job

    def scan(
        self,
        journal: Journal | None,
        on_bad: Callable[[BadLine], None],
        on_line: Callable[[], None],
        tally: Tally,
    ) -> Scan:
        """One pass that only counts; the callbacks are told of each line, and of each bad one.

        Answers that `journal` holds already go into `tally`.
        """
        scan = Scan()
        for job in self.jobs():
            on_line()
            index = job.line.index
            done = journal is not None and journal.is_done(index, job.key)
            before = journal is not None and not done and journal.has_failed(index)
            scan.add(job.line, done=done, failed_before=before)
            if journal is not None and not done and journal.has_answer(index):
                scan.num_changed += 1
            if isinstance(job.line, BadLine):
                on_bad(job.line)
            if done and journal is not None:
                tally.add_record(journal.record(index))
                tally.num_resumed += 1
        return scan

    def _lines(self) -> Iterator[Line]:
        if self.single is not None:
            yield self.single
            return
        assert self.source is not None
        parser = self.make_parser()
        for index, (number, raw) in enumerate(self.source.lines()):
            yield parser.parse(number, index, raw)
