"""Commands that show how things stand."""

import resource
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING

from minivllm_cli.chat.arguments import no_argument
from minivllm_cli.chat.reuse import explanation
from minivllm_cli.chat.session import SAMPLING_KEYS, Chat
from minivllm_cli.chat.settings_commands import describe_thinking
from minivllm_cli.chat.statistics import reuse_text, statistics_line
from minivllm_cli.chat.transcript import Transcript
from minivllm_cli.config.show import describe_source, shown_value
from minivllm_cli.errors import CliError
from minivllm_engine.core.snapshot_interval import snapshot_interval
from minivllm_engine.core.units import count_text, format_size

if TYPE_CHECKING:
    from minivllm_cli.chat.repl import Repl

Rows = Sequence[Sequence[str]]

TOPICS = (
    ("settings", "sampling and display, and where each value comes from"),
    ("stats", "what this chat has cost"),
    ("cache", "KV blocks, state slots, snapshots, and what was reused"),
    ("memory", "bytes of the pools and of the process"),
    ("model", "the model and its limits"),
    ("prompt", "the last prompt as the model got it"),
)


def show(repl: "Repl", argument: str) -> None:
    """`/show TOPIC`"""
    topics: dict[str, Callable[[Repl], str]] = {
        "settings": _settings,
        "stats": _stats,
        "cache": _cache,
        "memory": _memory,
        "model": _model,
        "prompt": _prompt,
    }
    if argument not in topics:
        near = get_close_matches(argument, topics, n=1)
        raise CliError(
            f"/show {argument}".rstrip() + ": no such topic",
            hint=f"/show {near[0]}" if near else f"one of {', '.join(topics)}",
        )
    repl.screen.print(topics[argument](repl))


def tokens(repl: "Repl", argument: str) -> None:
    """`/tokens`"""
    no_argument("/tokens", argument)
    chat = repl.chat
    total = chat.template.cost_of_history(chat.transcript)
    alone = chat.template.cost_of_history(Transcript(chat.transcript.system))
    limit = chat.llm.max_model_len
    repl.screen.print(
        f"system {alone:,} + history {total - alone:,} = {total:,} of {limit:,} tokens "
        f"({100 * total // limit}%)"
    )


def cache(repl: "Repl", argument: str) -> None:
    """`/cache`"""
    no_argument("/cache", argument)
    repl.screen.print(_cache(repl))


def why(repl: "Repl", argument: str) -> None:
    """`/why`"""
    no_argument("/why", argument)
    chat = repl.chat
    if chat.last_output is None:
        raise CliError("nothing has been asked yet")
    usage = chat.last_output.usage
    text = explanation(
        usage,
        chat.llm.tokenizer,
        thinking_dropped=chat.drops_thinking,
        block_size=chat.llm.config.cache.block_size,
    )
    repl.screen.print(f"prompt {reuse_text(usage.prompt_tokens, usage.cached_tokens)}\n{text}")


def _settings(repl: "Repl") -> str:
    settings = repl.chat.settings
    paths = {key: f"sampling.{key}" for key in SAMPLING_KEYS}
    sampling = [
        (key, shown_value(settings, path), describe_source(settings, path))
        for key, path in paths.items()
    ]
    rows = [
        ("system", _shortened(repl.chat.transcript.system)),
        ("thinking", describe_thinking(repl)),
        ("statistics", "on" if repl.screen.stats else "off"),
    ]
    if repl.chat.log is not None:
        rows.append(("transcript", str(repl.chat.log.path)))
    key_width = max(map(len, SAMPLING_KEYS))
    return f"{_table(sampling)}\n{_table(rows, key_width)}"


def _stats(repl: "Repl") -> str:
    totals, chat = repl.chat.totals, repl.chat
    rows = [
        ("answers", f"{totals.answers:,}"),
        ("prompt tokens", reuse_text(totals.prompt_tokens, totals.cached_tokens)),
        ("answer tokens", f"{totals.completion_tokens:,}"),
        ("answering", f"{totals.seconds:.1f} s"),
    ]
    if chat.last_output is not None:
        rows.append(("last answer", statistics_line(chat.last_output, chat.llm.max_model_len)))
    return _table(rows)


def _cache(repl: "Repl") -> str:
    chat = repl.chat
    stats, block_size = chat.llm.stats(), chat.llm.config.cache.block_size
    rows = [
        ("KV blocks", *_pool(stats.kv_blocks_used, stats.kv_blocks_total, stats.kv_blocks_peak)),
        (
            "state slots",
            *_pool(stats.state_slots_used, stats.state_slots_total, stats.state_slots_peak),
        ),
        (
            "snapshots",
            *_pool(stats.snapshots_used, stats.snapshots_total, stats.snapshots_peak),
        ),
    ]
    text = f"{_table(rows)}\nA block holds {block_size} tokens. "
    if not stats.snapshots_total:
        return text + "The prefix cache is off: each turn computes the whole chat again."
    kept = stats.blocks_cached * block_size
    text += (
        f"KV of {kept:,} tokens is kept; reuse comes in units of {snapshot_interval(block_size)}.\n"
    )
    totals = chat.totals
    share = totals.cached_tokens / max(totals.prompt_tokens, 1)
    return text + (
        f"This chat's prompts: {reuse_text(totals.prompt_tokens, totals.cached_tokens)} ({share:.0%}); "
        f"given up: {count_text(stats.snapshots_evicted, 'snapshot')}, "
        f"{count_text(stats.blocks_evicted, 'block')}."
    )


def _memory(repl: "Repl") -> str:
    from minivllm_engine.memory.sizes import kv_bytes_per_token, slot_bytes

    chat = repl.chat
    stats, model = chat.llm.stats(), chat.llm.model_config
    engine = chat.llm.config.engine
    block = kv_bytes_per_token(model, engine.dtype) * chat.llm.config.cache.block_size
    slot = slot_bytes(model, engine.dtype, engine.state_dtype)
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    rows = [
        ("KV blocks", _product(stats.kv_blocks_total, block)),
        ("state slots", _product(stats.state_slots_total, slot)),
        ("snapshots", _product(stats.snapshots_total, slot)),
        ("process, at its peak", format_size(peak)),
    ]
    return _table(rows)


def _model(repl: "Repl") -> str:
    llm = repl.chat.llm
    model, engine = llm.model_config, llm.config.engine
    kinds = f"{model.num_linear_layers} DeltaNet, {model.num_attention_layers} attention"
    rows = [
        ("model", str(repl.chat.model["name"])),
        ("directory", str(llm.model_path)),
        ("layers", f"{model.num_hidden_layers}: {kinds}"),
        ("hidden size", f"{model.hidden_size:,}"),
        ("vocabulary", f"{model.vocab_size:,}"),
        ("context", f"{llm.max_model_len:,} of at most {model.max_position_embeddings:,}"),
        ("runs on", f"{engine.device}, {engine.dtype}, states {engine.state_dtype}"),
    ]
    return _table(rows)


def _prompt(repl: "Repl") -> str:
    chat = repl.chat
    ids = prompt_ids(chat)
    text = chat.llm.tokenizer.decode(ids, skip_special_tokens=False)
    return f"{text}\n({count_text(len(ids), 'token')})"


def prompt_ids(chat: Chat) -> list[int]:
    """The tokens that the last question was answered from.

    Raises:
        CliError: nothing has been asked.
    """
    if chat.transcript.last_answer is None:
        raise CliError("nothing has been asked yet")
    prompt = chat.template.render(chat.transcript.without_answer())
    return chat.llm.tokenizer.encode(prompt)


def _pool(used: int, total: int, peak: int) -> tuple[str, str]:
    return f"{used:,}/{total:,} used", f"at most {peak:,} so far"


def _product(count: int, size: int) -> str:
    return f"{count:,} × {format_size(size)} = {format_size(count * size)}"


def _shortened(text: str | None, width: int = 50) -> str:
    if text is None:
        return "none"
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"


def _table(rows: Rows, key_width: int = 0) -> str:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    widths[0] = max(widths[0], key_width)
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)
