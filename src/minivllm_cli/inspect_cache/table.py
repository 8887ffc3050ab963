"""The document of `inspect-cache` as text for people, at most 80 columns wide."""

from collections.abc import Iterator
from typing import Any

from minivllm_cli.console.table import Column, table_text
from minivllm_engine.core.units import count_text, format_size

_NAMES = {"unused": "unused in budget"}
_SHORT = {
    "KV": "KV: no room for the KV blocks",
    "state": "state: no room for the state slots",
    "both": "both: no room for either",
}
_POOLS = {"state": "state slots", "kv": "KV blocks", "snapshots": "snapshots"}


def render_table(document: dict[str, Any]) -> str:
    """Render the plan, in all its parts, one below the other."""
    device, limits, pools = document["devices"][0], document["limits"], document["pools"]
    parts = [f"{document['model']['name']} on {_title(device)}\n", _shares(device, limits, pools)]
    lines = ["", *_unit_lines(device, limits, pools)]
    if document["fits"]:
        lines += _fits_lines(limits)
    parts.append("".join(f"{line}\n" for line in lines))
    if document["what_fits"]:
        parts.append("\n" + _matrix(document["what_fits"]))
    return "".join(parts)


def _shares(device: dict[str, Any], limits: dict[str, Any], pools: dict[str, Any]) -> str:
    """The device's memory, a row a share; beside each what was allocated, or where the figure is from."""
    rows = []
    for row in device["rows"]:
        label = _NAMES.get(row["name"], row["name"])
        if row["name"] == "unused" and row["bytes"] < 0:
            label = "too much"
        detail = _detail(row["name"], device, limits, pools)
        rows.append((label, detail, format_size(row["bytes"]), _last_column(row)))
        if label == "other processes":
            rows += [
                (f"  {_who(process)}", "", format_size(process["bytes"]), "")
                for process in device["other_processes"]
            ]
    rows.append(("total", "", format_size(device["total"]), ""))
    measured = any(row.get("measured") is not None for row in device["rows"])
    columns = [
        Column(),
        Column(),
        Column("planned", right=True),
        Column("allocated", right=measured),
    ]
    return table_text(columns, rows, heading=measured, indent=2)


def _last_column(row: dict[str, Any]) -> str:
    if "measured" not in row:
        return str(row["basis"])
    return "" if row["measured"] is None else format_size(row["measured"])


def _title(device: dict[str, Any]) -> str:
    pools = f"pools get {format_size(max(device['pools_budget'], 0))}"
    if device["pools_why"]:
        pools += f" ({device['pools_why']})"
    if device["kind"] == "cpu":
        return f"{device['name']} with {format_size(device['total'])}\n{pools}"
    budget = device["budget"]
    size = format_size(int(budget * device["total"]))
    return f"{device['name']}, budget {budget:.0%} = {size}\n{pools}"


def _who(process: dict[str, Any]) -> str:
    name = str(process["name"])
    return name if process["pid"] is None else f"pid {process['pid']} {name}"


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
    """How many there are: those that requests can have, and the spare one that padding writes to."""
    sinks = pool["sinks"]
    return f"({pool['total']:,} + {sinks} spare)" if sinks else f"{pool['total']:,}"


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
        tokens = limits["kv_tokens_per_slot"]
        yield f"a slot or snapshot takes as much as {tokens:,} tokens of KV"
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


def _matrix(cells: list[dict[str, Any]]) -> str:
    """Rows by sequences, columns by length; [ ] marks the plan in force."""
    lengths = sorted({cell["max_model_len"] for cell in cells})
    counts = sorted({cell["max_num_seqs"] for cell in cells})
    by_place = {(c["max_num_seqs"], c["max_model_len"]): c for c in cells}
    rows = [
        [f"{count:,}", *(_cell(by_place[count, length]) for length in lengths)] for count in counts
    ]
    columns = [Column(right=True), *(Column(f"{length:,} ", right=True) for length in lengths)]
    what = "what fits: max_num_seqs down, max_model_len across; full-length requests at once\n"
    missing = sorted({_SHORT[c["verdict"]] for c in cells if c["verdict"] != "ok"})
    legend = f"{'; '.join(missing)}\n" if missing else ""
    return what + table_text(columns, rows, indent=2) + legend


def _cell(cell: dict[str, Any]) -> str:
    text = str(cell["verdict"])
    if text == "ok":
        text = f"ok {cell['full_length_requests']:,}"
    return f"[{text}]" if cell["is_current"] else f"{text} "
