"""The document of `inspect-cache` as text for people, at most 80 columns wide."""

from collections.abc import Iterator
from typing import Any

from minivllm_engine.core.units import count_text, format_size

_NAMES = {"unused": "unused in budget"}
_POOLS = {"state": "state slots", "kv": "KV blocks", "snapshots": "snapshots"}


def render_table(document: dict[str, Any]) -> str:
    """The plan, in all its parts, one below the other."""
    device, limits, pools = document["devices"][0], document["limits"], document["pools"]
    lines = [*_device_lines(document["model"]["name"], device, limits, pools), ""]
    lines += _unit_lines(device, limits, pools)
    if document["fits"]:
        lines += _fits_lines(limits)
    if document["what_fits"]:
        lines += ["", *_matrix(document["what_fits"])]
    return "".join(line.rstrip() + "\n" for line in lines)


def _device_lines(
    name: str, device: dict[str, Any], limits: dict[str, Any], pools: dict[str, Any]
) -> Iterator[str]:
    yield f"{name} on {_title(device)}"
    rows = []
    for row in device["rows"]:
        label = _NAMES.get(row["name"], row["name"])
        if row["name"] == "unused" and row["bytes"] < 0:
            label = "too much"
        rows.append(
            (label, _detail(row["name"], device, limits, pools), row["bytes"], _last_column(row))
        )
    rows.append(("total", "", device["total"], ""))
    widths = [max(len(str(row[i])) for row in rows) for i in (0, 1)]
    if any(row.get("measured") is not None for row in device["rows"]):
        yield f"  {'':<{widths[0]}}  {'':<{widths[1]}}  {'planned':>11}  {'allocated':>11}"
    for label, detail, size, basis in rows:
        shown = f"{format_size(size):>11}"
        yield f"  {label:<{widths[0]}}  {detail:<{widths[1]}}  {shown}  {basis}"
        if label == "other processes":
            yield from _process_lines(device)


def _last_column(row: dict[str, Any]) -> str:
    if "measured" not in row:
        return str(row["basis"])
    return "" if row["measured"] is None else f"{format_size(row['measured']):>11}"


def _title(device: dict[str, Any]) -> str:
    if device["kind"] == "cpu":
        pools = format_size(max(device["pools_budget"], 0))
        return f"{device['name']} with {format_size(device['total'])}, pools get {pools}"
    budget = device["budget"]
    size = format_size(int(budget * device["total"]))
    return f"{device['name']}, budget {budget:.0%} = {size}"


def _process_lines(device: dict[str, Any]) -> Iterator[str]:
    for process in device["other_processes"]:
        who = (
            process["name"] if process["pid"] is None else f"pid {process['pid']} {process['name']}"
        )
        yield f"    {who}: {format_size(process['bytes'])}"


def _detail(row: str, device: dict[str, Any], limits: dict[str, Any], pools: dict[str, Any]) -> str:
    kv, state, snapshots = pools["kv"], pools["state"], pools["snapshots"]
    slot = format_size(state["unit_bytes"])
    sizes = device["graph_sizes"]
    details: dict[str, str] = {
        "context": "CUDA and its libraries",
        "weights": device["dtype"],
        "activations": f"a step of {limits['max_num_batched_tokens']:,} tokens",
        "graph reserve": f"for batches ≤ {sizes[-1]} ({len(sizes)})" if sizes else "no graphs",
        "state slots": f"{_with_sinks(state)} × {slot}",
        "snapshots": f"{_with_sinks(snapshots)} × {slot}",
        "KV blocks": f"{_with_sinks(kv)} × {format_size(kv['unit_bytes'])}",
    }
    return details.get(row, "")


def _with_sinks(pool: dict[str, Any]) -> str:
    """How many there are: those that requests can have, and the one that idle lanes write to."""
    sinks = pool["sinks"]
    return f"({pool['total']:,} + {sinks} sink)" if sinks else f"{pool['total']:,}"


def _unit_lines(
    device: dict[str, Any], limits: dict[str, Any], pools: dict[str, Any]
) -> Iterator[str]:
    kv, state = pools["kv"], pools["state"]
    yield (
        f"a slot or snapshot: {format_size(state['unit_bytes'])} = "
        f"recurrent {device['state_dtype']} {format_size(state['recurrent_bytes'])} + "
        f"conv {device['dtype']} {format_size(state['conv_bytes'])}"
    )
    some, all_ = kv["layers"]
    yield (
        f"a token of KV: {format_size(kv['bytes_per_token'])} in {some} of {all_} layers, "
        f"{kv['saved']:.0%} less than in all of them"
    )
    tokens = max(kv["total"], 0) * kv["block_size"]
    yield f"KV holds {tokens:,} tokens, {kv['block_size']} in a block"
    if kv["bytes_per_token"]:
        yield f"exchange rate: 1 state slot or snapshot = {limits['kv_tokens_per_slot']:,} KV tokens"
    shortest = limits["min_reusable_prefix"]
    yield (
        "shortest prefix that can hit: "
        f"{'none: the prefix cache keeps nothing' if shortest is None else f'{shortest} tokens'}"
    )


def _fits_lines(limits: dict[str, Any]) -> Iterator[str]:
    most, unlowered = limits["largest_max_num_seqs"], limits["unlowered_max_num_seqs"]
    length = f"{limits['max_model_len']:,}"
    # A length that is set stays; one that is not gives way to more sequences.
    at = limits["set_max_model_len"]
    where = ", max_model_len lowered as needed" if at is None else f" at max_model_len {at:,}"
    if limits["bound_by"] is None:
        yield "fits: any max_num_seqs"
    else:
        yield f"fits: max_num_seqs ≤ {most:,} ({_POOLS[limits['bound_by']]}){where}"
        yield "      more ends with exit code 4"
    if unlowered != most:
        yield f"      ≤ {unlowered:,} with a KV block each, max_model_len {length} and snapshots kept"
    yield (
        f"at max_model_len {length}: "
        f"{count_text(limits['full_length_requests'], 'full-length request')} at once"
    )


def _matrix(cells: list[dict[str, Any]]) -> Iterator[str]:
    """Rows by sequences, columns by length; [ ] marks the plan in force."""
    lengths = sorted({cell["max_model_len"] for cell in cells})
    counts = sorted({cell["max_num_seqs"] for cell in cells})
    by_place = {(c["max_num_seqs"], c["max_model_len"]): c for c in cells}
    yield "what fits: max_num_seqs down, max_model_len across; full-length requests at once"
    table = [["", *(f"{length:,}" for length in lengths)]]
    for count in counts:
        table.append([f"{count:,}", *(_cell(by_place[count, length]) for length in lengths)])
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    for row in table:
        yield "  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))


def _cell(cell: dict[str, Any]) -> str:
    text = str(cell["verdict"])
    if text == "ok":
        text = f"ok {cell['full_length_requests']:,}"
    return f"[{text}]" if cell["is_current"] else f"{text} "
