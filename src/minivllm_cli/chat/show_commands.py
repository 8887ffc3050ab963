"""Commands that show how things stand."""

import resource
import sys
from collections.abc import Callable, Mapping, Sequence

from minivllm_cli.chat.repl import Repl
from minivllm_cli.chat.session import SAMPLING_KEYS, Chat
from minivllm_cli.chat.statistics import explanation, reuse_text, statistics_line
from minivllm_cli.chat.transcript import Transcript
from minivllm_cli.config.show import describe_source, shown_value
from minivllm_cli.console.table import Column, table_text
from minivllm_cli.errors import CliError
from minivllm_engine.core.snapshot_interval import snapshot_interval
from minivllm_engine.core.suggest import suggest
from minivllm_engine.core.units import count_text, format_size


def show(repl: Repl, argument: str) -> None:
    """Show a topic; alone list the topics."""
    if not argument:
        repl.screen.print(_table([(f"/show {name}", text) for name, (text, _) in TOPICS.items()]))
        return
    if argument not in TOPICS:
        near = suggest(argument, TOPICS)
        raise CliError(
            f"/show {argument}: no such topic",
            hint=f"/show {near}" if near else f"one of {', '.join(TOPICS)}",
        )
    repl.screen.print(TOPICS[argument][1](repl), indent=_INDENTS.get(argument, 0))


def tokens(repl: Repl, argument: str) -> None:
    chat = repl.chat
    total = chat.template.cost_of_history(chat.transcript)
    alone = chat.template.cost_of_history(Transcript(chat.transcript.system))
    limit = chat.llm.max_model_len
    repl.screen.print(
        f"system {alone:,} + history {total - alone:,} = {total:,} of {limit:,} tokens "
        f"({100 * total // limit}%)"
    )


def cache(repl: Repl, argument: str) -> None:
    repl.screen.print(_cache(repl))


def why(repl: Repl, argument: str) -> None:
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


def describe_thinking(repl: Repl) -> str:
    """Tell how thinking stands: asked for, shown, kept."""
    asked = {None: "the template's default", True: "on", False: "off"}[repl.chat.think]
    kept = "not kept" if repl.chat.thinking_in_history == "drop" else "kept"
    return f"{asked}, {repl.screen.thinking}, {kept} in the history"


def sampling_table(chat: Chat, *keys: str) -> str:
    """Tell sampling keys, all unless some are named, with their values and where those come from."""
    paths = {key: f"sampling.{key}" for key in keys or SAMPLING_KEYS}
    settings = chat.settings
    return _table(
        [
            (key, shown_value(settings, path), describe_source(settings, path))
            for key, path in paths.items()
        ]
    )


def _totals(repl: Repl) -> str:
    totals, chat = repl.chat.totals, repl.chat
    rows = [
        ("answers", f"{totals.answers:,}"),
        ("prompt tokens", reuse_text(totals.prompt_tokens, totals.cached_tokens)),
        ("answer tokens", f"{totals.completion_tokens:,}"),
        ("answering", f"{totals.seconds:.1f} s"),
    ]
    if chat.last_output is not None:
        rows.append(("last answer", statistics_line(chat.last_output, chat.llm.max_model_len)))
    rows.append(("after each answer", "shown" if repl.screen.stats else "not shown"))
    return _table(rows)


def _settings(repl: Repl) -> str:
    rows = [
        ("system", _shortened(repl.chat.transcript.system)),
        ("thinking", describe_thinking(repl)),
        ("statistics", "on" if repl.screen.stats else "off"),
    ]
    if repl.chat.log is not None:
        rows.append(("transcript", str(repl.chat.log.path)))
    width = max(map(len, SAMPLING_KEYS))
    return f"{sampling_table(repl.chat)}\n{_table(rows, width)}"


def _cache(repl: Repl) -> str:
    chat = repl.chat
    stats, block_size = chat.llm.stats(), chat.llm.config.cache.block_size
    pools = [
        ("KV blocks", stats.kv_blocks_used, stats.kv_blocks_total, stats.kv_blocks_peak),
        ("state slots", stats.state_slots_used, stats.state_slots_total, stats.state_slots_peak),
        ("snapshots", stats.snapshots_used, stats.snapshots_total, stats.snapshots_peak),
    ]
    rows = [
        (name, f"{used:,}/{total:,} used", f"at most {peak:,} so far")
        for name, used, total, peak in pools
    ]
    text = f"{_table(rows)}\nA block holds {block_size} tokens. "
    if not stats.snapshots_total:
        return text + "The prefix cache is off: each turn computes the whole chat again."
    kept = stats.blocks_cached * block_size
    totals = chat.totals
    share = totals.cached_tokens / max(totals.prompt_tokens, 1)
    return text + (
        f"KV of {kept:,} tokens is kept; reuse comes in units of {snapshot_interval(block_size)}.\n"
        f"This chat's prompts: {reuse_text(totals.prompt_tokens, totals.cached_tokens)} ({share:.0%}); "
        f"evicted: {count_text(stats.snapshots_evicted, 'snapshot')}, "
        f"{count_text(stats.blocks_evicted, 'block')}."
    )


def _memory(repl: Repl) -> str:
    from minivllm_engine.memory.sizes import kv_bytes_per_token, slot_bytes

    llm = repl.chat.llm
    stats, model, engine = llm.stats(), llm.model_config, llm.config.engine
    block = kv_bytes_per_token(model, engine.dtype) * llm.config.cache.block_size
    slot = slot_bytes(model, engine.dtype, engine.state_dtype)
    pools = [
        ("KV blocks", stats.kv_blocks_total, block),
        ("state slots", stats.state_slots_total, slot),
        ("snapshots", stats.snapshots_total, slot),
    ]
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    rows = [
        (name, f"{count:,} × {format_size(size)} = {format_size(count * size)}")
        for name, count, size in pools
    ]
    return _table([*rows, ("process, at its peak", format_size(peak))])


def _model(repl: Repl) -> str:
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


def _prompt(repl: Repl) -> str:
    ids = prompt_ids(repl.chat)
    text = repl.chat.llm.tokenizer.decode(ids, skip_special_tokens=False)
    return f"{text}\n({count_text(len(ids), 'token')})"


def prompt_ids(chat: Chat) -> list[int]:
    """Return the tokens that the last question was answered from.

    Raises:
        CliError: nothing has been asked.
    """
    if chat.transcript.last_answer is None:
        raise CliError("nothing has been asked yet")
    prompt = chat.template.render(chat.transcript.without_answer())
    return chat.llm.tokenizer.encode(prompt)


TOPICS: Mapping[str, tuple[str, Callable[[Repl], str]]] = {
    "settings": ("sampling and display, and where each value comes from", _settings),
    "stats": ("what this chat has cost", _totals),
    "cache": ("KV blocks, state slots, snapshots, and what was reused", _cache),
    "memory": ("bytes of the pools and of the process", _memory),
    "model": ("the model and its limits", _model),
    "prompt": ("the last prompt as the model got it", _prompt),
}

_INDENTS = {"stats": 19, "model": 13}  # where the values begin


def _shortened(text: str | None, width: int = 50) -> str:
    if text is None:
        return "none"
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"


def _table(rows: Sequence[Sequence[str]], key_width: int = 0) -> str:
    columns = [Column(width=key_width), *[Column()] * (len(rows[0]) - 1)]
    return table_text(columns, rows, heading=False).rstrip("\n")
