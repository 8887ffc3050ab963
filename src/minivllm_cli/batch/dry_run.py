"""`--dry-run`: what a run would do with its input, found out without weights."""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm_cli import engine
from minivllm_cli.batch.flags import GenerateFlags, OnError
from minivllm_cli.batch.jobs import JobSource, Scan
from minivllm_cli.batch.prompts import PromptBuilder
from minivllm_cli.batch.report import LineReports, kinds_text
from minivllm_cli.command import Invocation
from minivllm_cli.config.settings import Settings
from minivllm_cli.console.streams import print_result, strip_controls
from minivllm_cli.console.table import Column, table_text
from minivllm_cli.errors import CliError, ExitCode, Problem
from minivllm_engine.core.errors import CapacityError, RequestError
from minivllm_engine.core.units import count_text, format_size
from minivllm_engine.protocol.lines import BadLine, Job, RequestLine

if TYPE_CHECKING:
    from minivllm_engine.text.tokenizer import Tokenizer

_MOST_SHOWN = 20


@dataclass
class _Look:
    """What one pass with a tokenizer finds. `histogram` counts prompts by powers of two of tokens,
    `num_sequences` outputs of the lines that would not fail."""

    scan: Scan = field(default_factory=Scan)
    histogram: Counter[int] = field(default_factory=Counter)
    num_sequences: int = 0
    num_tokens: int = 0
    longest: int = 0
    num_truncated: int = 0
    num_too_long: int = 0
    too_long: list[dict[str, Any]] = field(default_factory=list)
    num_refused: int = 0
    first: dict[str, Any] | None = None

    @property
    def num_failing(self) -> int:
        return self.scan.num_bad + self.num_too_long + self.num_refused


def run_dry(
    run: Invocation, settings: Settings, flags: GenerateFlags, source: JobSource, model_path: Path
) -> int:
    """Print counts, lengths, the first prompt as it would be sent, and whether memory suffices.

    Raises:
        CliError: the input is empty, or has bad lines under `--on-error stop`.
        CapacityError: the engine would not fit; the rest is printed before.
    """
    run.interrupts.activity = "looking at the input"
    limit, memory, does_not_fit = _memory(settings, model_path)
    tokenizer = engine.load_tokenizer(model_path)
    builder = PromptBuilder(
        tokenizer,
        limit,
        think=source.overrides.think,
        template_for_prompts=flags.chat_template_for_prompts,
        raw=flags.raw,
        truncate=flags.truncate,
    )
    look = _Look()
    name = source.name
    stop = flags.on_error is OnError.STOP
    reports = LineReports(run.console, name, all_of_them=stop)
    for job in source.jobs():
        look.scan.add(job.line, done=False, failed_before=False)
        if isinstance(job.line, BadLine):
            reports.bad(job.line)
        else:
            for part in job.line.parts:
                _look_at(job, part, builder, tokenizer, look, reports)
    reports.end()
    if look.scan.total == 0:
        raise CliError(f"{name} holds no prompts (empty_file)")
    document = _document(look, limit, memory)
    text = json.dumps(document, allow_nan=False) + "\n" if flags.json_ else _table(document)
    print_result(text)
    if does_not_fit is not None:
        raise does_not_fit
    if not look.num_failing:
        return ExitCode.OK
    what = f"{look.num_failing} of {count_text(look.scan.total, 'line')} would fail"
    if stop and look.scan.num_bad:
        raise CliError(what)
    run.console.error(Problem(what))
    return ExitCode.SOME_REQUESTS_FAILED


def _memory(
    settings: Settings, model_path: Path
) -> tuple[int, dict[str, Any], CapacityError | None]:
    try:
        plan = engine.plan_memory(settings, model_path)
    except CapacityError as error:
        verdict = {"fits": False, "verdict": f"does not fit: {error.what}"}
        return engine.longest_allowed(settings, model_path), verdict, error
    verdict = {
        "fits": True,
        "verdict": f"fits: {count_text(plan.max_num_seqs, 'state slot')}, "
        f"{count_text(plan.num_blocks, 'block')} of "
        f"{plan.block_size} tokens, {format_size(plan.pool_bytes)}",
        "max_num_seqs": plan.max_num_seqs,
        "kv_blocks": plan.num_blocks,
        "snapshots": plan.num_snapshots,
        "weight_bytes": plan.weight_bytes,
        "activation_bytes": plan.activation_bytes,
        "pool_bytes": plan.pool_bytes,
    }
    return plan.max_model_len, verdict, None


def _look_at(
    job: Job,
    line: RequestLine,
    builder: PromptBuilder,
    tokenizer: "Tokenizer",
    look: _Look,
    reports: LineReports,
) -> None:
    assert job.params is not None
    try:
        prompt = builder.build(line, job.params)
    except RequestError as error:
        least = getattr(error, "num_tokens", None)  # of one that is too long whatever it has
        if least is None:
            reports.refused(line, error, error.hint)
            look.num_refused += 1
        else:
            _add_too_long(line, least, look)
        return
    length = len(prompt.ids)
    look.num_tokens += length
    look.longest = max(look.longest, length)
    look.num_truncated += prompt.truncated > 0
    look.histogram[max(length - 1, 0).bit_length()] += 1
    if builder.is_too_long(prompt):
        _add_too_long(line, length, look)
    else:
        look.num_sequences += job.params.n
    if look.first is None:
        text = tokenizer.decode(prompt.ids, skip_special_tokens=False)
        look.first = {"id": line.id, "text": text, "token_ids": prompt.ids}


def _add_too_long(line: RequestLine, length: int, look: _Look) -> None:
    look.num_too_long += 1
    if len(look.too_long) < _MOST_SHOWN:
        look.too_long.append({"id": line.id, "line": line.number, "prompt_tokens": length})


def _document(look: _Look, limit: int, memory: dict[str, Any]) -> dict[str, Any]:
    bins = sorted(look.histogram)
    return {
        "schema_version": 1,
        "kind": "dry-run",
        "lines": {"total": look.scan.total, **look.scan.kinds},
        "bad": dict(look.scan.bad_codes),
        "refused": look.num_refused,
        "sequences": look.num_sequences,
        "prompt_tokens": {
            "total": look.num_tokens,
            "longest": look.longest,
            "limit": limit - 1,
            "histogram": [
                {"up_to": 1 << power, "prompts": look.histogram[power]} for power in bins
            ],
        },
        "truncated": look.num_truncated,
        "too_long": {"count": look.num_too_long, "first": look.too_long},
        "memory": memory,
        "first_prompt": look.first,
    }


def _table(document: dict[str, Any]) -> str:
    tokens, lines, memory = document["prompt_tokens"], document["lines"], document["memory"]
    kinds = " · ".join(kinds_text({kind: n for kind, n in lines.items() if kind != "total"}))
    longest = f"longest {tokens['longest']:,} of {tokens['limit']:,}"
    rows = [
        ("lines", f"{lines['total']:,} ({kinds})"),
        ("sequences", f"{document['sequences']:,}"),
        ("prompt tokens", f"{tokens['total']:,}, {longest}"),
    ]
    for row in tokens["histogram"]:
        rows.append((f"  up to {row['up_to']:,}", count_text(row["prompts"], "prompt")))
    if document["truncated"]:
        rows.append(("truncated", f"{document['truncated']:,}"))
    if document["refused"]:
        rows.append(("refused", f"{document['refused']:,}"))
    over = document["too_long"]
    rows.append(("over the limit", f"{over['count']:,}"))
    for row in over["first"]:
        length = count_text(row["prompt_tokens"], "token")
        rows.append((f"  {row['id']}", f"line {row['line']}, {length}"))
    rows.append(("memory", memory["verdict"]))
    if memory["fits"]:
        rows.append(("  snapshots", f"{memory['snapshots']:,}"))
        rows.append(("  weights", format_size(memory["weight_bytes"])))
        rows.append(("  activations", format_size(memory["activation_bytes"])))
    text = table_text([Column(), Column()], rows, heading=False)
    first = document["first_prompt"]
    if first is not None:
        text += f"first prompt ({first['id']}):\n{strip_controls(first['text'])}\n"
    return text
