"""The lines of an input as jobs, and the first pass over them: what is in it, wrong with it, done already."""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from minivllm_cli.batch.flags import GenerateFlags, InputFormat
from minivllm_cli.batch.prompts import Overrides
from minivllm_cli.batch.tally import Tally
from minivllm_cli.config.settings import Settings
from minivllm_cli.console.streams import Console
from minivllm_cli.errors import CliError
from minivllm_cli.files.fingerprint import line_key
from minivllm_cli.files.input_file import InputFile
from minivllm_cli.files.journal import Journal
from minivllm_engine.core.sampling_params import ResolvedSampling
from minivllm_engine.protocol.line_parser import LineParser
from minivllm_engine.protocol.lines import BadLine, Job, Line, RequestLine
from minivllm_engine.protocol.records import record_failed
from minivllm_engine.protocol.strict_json import BadJson, parse_object

_BAD_LINE_KEY = "0" * 32
SCORED = ResolvedSampling(seed=0, max_tokens=0)


@dataclass
class Selection:
    """The part of the input that was asked for. Without limits, all of it."""

    limit: int | None = None
    ids: frozenset[str] | None = None

    @classmethod
    def of(cls, flags: GenerateFlags) -> "Selection":
        """Read what `--limit`, `--select` and `--only-failed` say.

        Raises:
            CliError: the file of `--only-failed` cannot be read, or has no failures.
        """
        ids = frozenset(flags.select) if flags.select else None
        if flags.only_failed is not None:
            failed = failed_ids(flags.only_failed)
            ids = failed if ids is None else ids & failed
        return cls(flags.limit, ids)

    def pick(self, lines: Iterable[Line]) -> Iterator[Line]:
        """Return the selected lines, in order."""
        taken = 0
        for line in lines:
            if self.limit is not None and taken >= self.limit:
                return
            if self.ids is None or str(line.id) in self.ids:
                taken += 1
                yield line


@dataclass
class Scan:
    """Counts of one pass over the selected lines.

    Attributes:
        indices: of the selected lines, in input order.
        kinds: lines of each kind; "bad" are those that cannot be run.
        num_sequences: outputs asked for, `n` counted.
        num_own_max_tokens: lines with a max_tokens of their own, or one that is forced on them.
        num_done: answered by an earlier run.
        num_changed: answered by an earlier run, but as another request than it is now.
        num_failed_before: failed in an earlier run, to be tried again.
    """

    indices: "array[int]" = field(default_factory=lambda: array("q"))
    kinds: Counter[str] = field(default_factory=Counter)
    bad_codes: Counter[str] = field(default_factory=Counter)
    num_sequences: int = 0
    num_sequences_done: int = 0
    num_own_max_tokens: int = 0
    num_done: int = 0
    num_changed: int = 0
    num_failed_before: int = 0

    @property
    def total(self) -> int:
        """Selected lines, good and bad."""
        return len(self.indices)

    @property
    def num_bad(self) -> int:
        """Lines that cannot be run."""
        return self.kinds["bad"]

    @property
    def num_left(self) -> int:
        """Lines that the model has to answer."""
        return self.total - self.num_bad - self.num_done

    @property
    def counts_outputs(self) -> bool:
        """Do some lines ask for several outputs, so that these must be told from requests?"""
        return self.num_sequences != self.total

    def counted(self, done: int) -> str:
        """Write how many lines are done: "812/1000", with their unit where outputs are counted beside."""
        return f"{done}/{self.total}{' requests' if self.counts_outputs else ''}"

    def add(self, line: Line, *, done: bool, failed_before: bool) -> None:
        """Count one line."""
        self.indices.append(line.index)
        sequences = line.num_sequences if isinstance(line, RequestLine) else 1
        self.num_sequences += sequences
        if done:
            self.num_done += 1
            self.num_sequences_done += sequences
        elif failed_before:
            self.num_failed_before += 1
        if isinstance(line, BadLine):
            self.kinds["bad"] += 1
            self.bad_codes[line.code] += 1
        else:
            self.num_own_max_tokens += line.params.max_tokens is not None
            self.kinds["batch" if line.batch is not None else line.kind] += 1


def failed_ids(path: Path) -> frozenset[str]:
    """Return the ids of the failures in an earlier output.

    Raises:
        CliError: it cannot be read, or is no output of `generate`.
    """
    found: set[str] = set()
    number = 0
    try:
        with open(path, encoding="utf-8") as file:
            for line in file:
                number += 1
                if line.strip():
                    record = parse_object(line)
                    if record_failed(record):
                        found.add(
                            str(record["custom_id"] if "response" in record else record["id"])
                        )
    except OSError as error:
        raise CliError(
            f"cannot read {path}: {error.strerror or error}",
            hint="--only-failed FILE, an earlier --output",
        ) from None
    except (BadJson, UnicodeDecodeError, KeyError, TypeError):
        raise CliError(f"{path}:{max(number, 1)}: not a record of minivllm generate") from None
    if not found:
        raise CliError(f"{path} has no failed records")
    return frozenset(found)


@dataclass(frozen=True)
class JobSource:
    """Reads the same jobs in every pass, one at a time.

    Attributes:
        source: None for `--prompt`.
        chat: `--prompt` is a user message, not raw text.
        text_hint: what to say of a line that looks like plain text.
    """

    source: InputFile | None
    flags: GenerateFlags
    settings: Settings
    overrides: Overrides
    selection: Selection
    chat: bool = False
    text_hint: str | None = None

    @property
    def name(self) -> str:
        """The input, as it stands in messages."""
        return "--prompt" if self.source is None else self.source.name

    def jobs(self) -> Iterator[Job]:
        """Yield all selected lines, good and bad."""
        flags = self.flags
        for position, line in enumerate(self.selection.pick(self._lines())):
            if isinstance(line, BadLine):
                yield Job(position, line, _BAD_LINE_KEY)
                continue
            # What only answers depend on must not make a score another request.
            params = SCORED if line.score else self.settings.sampling(line.params, index=line.index)
            key = line_key(
                line,
                params,
                think=self.overrides.think,
                template=flags.chat_template_for_prompts,
                raw=flags.raw,
                truncate=flags.truncate,
                strip=flags.strip_thinking,
            )
            yield Job(position, line, key, params)

    def jobs_left(self, journal: Journal | None) -> Iterator[Job]:
        """Yield the jobs that `journal` does not hold an answer for."""
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
        """Count only, in one pass; the callbacks are told of each line, and of each bad one.

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
        parser = LineParser(
            as_text=self.flags.input_format is InputFormat.TEXT,
            defaults=self.overrides.defaults,
            forced=self.overrides.forced,
            text_hint=self.text_hint,
        )
        if self.source is None:
            yield parser.single(self.flags.prompt or "", chat=self.chat)
            return
        for index, (number, raw) in enumerate(self.source.lines()):
            yield parser.parse(number, index, raw)


def refuse_to_lose(journal: Journal, scan: Scan, console: Console, *, force: bool) -> None:
    """Refuse a run that would not publish every answer in the journal, which goes with the publication.

    Args:
        force: lines that changed since they were answered may be answered again.

    Raises:
        CliError: answers would be lost; how many, and why.
    """
    outside = journal.num_usable - scan.num_done - scan.num_changed
    changed = 0 if force else scan.num_changed
    if not outside and not changed:
        if scan.num_changed:
            console.warn(f"{scan.num_changed} answered lines changed and are run again")
        return
    parts = [
        f"{outside} are of lines that this run leaves out" if outside else "",
        f"{changed} are of lines that changed, or whose sampling did" if changed else "",
    ]
    again = "" if outside else "--resume force to run the changed lines again, "
    raise CliError(
        f"{journal.path} holds {journal.num_usable} finished answers; this run would lose "
        f"{outside + changed} of them",
        why="; ".join(part for part in parts if part),
        hint=f"the same command as before, {again}or --overwrite to start again",
    )
