"""What a cache dump has to look like before anything of it is shown: nothing in it is trusted."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from minivllm_engine.core.outputs import MissReason

Count = Annotated[int, Field(ge=0, le=2**60)]
Size = Annotated[int, Field(ge=-(2**60), le=2**60)]
Share = Annotated[float, Field(ge=0, le=1)]


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("holds control characters")
    return text


Name = Annotated[str, Field(max_length=255), AfterValidator(_printable)]
Sentence = Annotated[str, Field(max_length=2000), AfterValidator(_printable)]
Dtype = Literal["fp32", "bf16", "fp16"]


class _Part(BaseModel):
    # What a later version adds is left out.
    model_config = ConfigDict(extra="ignore", strict=True)


class Model(_Part):
    name: Name
    hash: Name


class Process(_Part):
    pid: Count | None
    name: Name
    bytes: Count


class Row(_Part):
    name: Name
    bytes: Size
    basis: Name
    measured: Count | None = None


class Device(_Part):
    name: Name
    kind: Literal["cpu", "cuda"]
    total: Count
    budget: Share | None
    pools_budget: Size
    pools_why: Sentence = ""
    dtype: Dtype
    state_dtype: Dtype
    graph_sizes: Annotated[list[Count], Field(max_length=1000)]
    other_processes: Annotated[list[Process], Field(max_length=1000)]
    rows: Annotated[list[Row], Field(max_length=100)]
    unaccounted: Size

    @model_validator(mode="after")
    def _has_a_budget(self) -> Self:
        if self.kind == "cuda" and self.budget is None:
            raise ValueError("a GPU without a budget")
        return self


class _Pool(_Part):
    unit_bytes: Count
    total: Size
    sinks: Count
    used: Count
    peak: Count


class KVPool(_Pool):
    block_size: Count
    bytes_per_token: Count
    layers: Annotated[list[Count], Field(min_length=2, max_length=2)]
    saved: Share
    cached: Count = 0


class StatePool(_Pool):
    per_request: Count
    conv_bytes: Count
    recurrent_bytes: Count


class Pools(_Part):
    kv: KVPool
    state: StatePool
    snapshots: _Pool


class Limits(_Part):
    max_num_seqs: Count
    max_model_len: Count
    max_num_batched_tokens: Count
    largest_max_num_seqs: Count
    bound_by: Literal["kv", "state", "snapshots"] | None
    set_max_model_len: Count | None = None
    unlowered_max_num_seqs: Count
    unlowered_bound_by: Literal["kv", "state", "snapshots"] | None
    full_length_requests: Count
    min_reusable_prefix: Count | None
    kv_tokens_per_slot: Count


class Cell(_Part):
    max_num_seqs: Count
    max_model_len: Count
    verdict: Literal["ok", "KV", "state", "both"]
    full_length_requests: Count
    is_current: bool


class Hit(_Part):
    requests: Count
    prompt_tokens: Count
    kv_tokens: Count
    usable_tokens: Count
    restored_tokens: Count
    kv: Share
    usable: Share


class Segment(_Part):
    id: Count
    parent: Count
    start: Count
    end: Count
    blocks: Count
    hits: Count
    refs: Count
    snapshot: Count | None
    recomputed: Count
    recomputed_tokens: Count
    age: Count
    hash: Annotated[str, Field(pattern="^[0-9a-f]{4,64}$")]
    text: str | None = None


class Evicted(_Part):
    snapshots: Count
    kv_blocks: Count


class Document(_Part):
    """A document of any view of `inspect-cache`, or of `--cache-dump`."""

    schema_version: Literal[1]
    kind: Literal["cache"]
    source: Literal["plan", "run", "generate", "chat", "bench"]
    time: Annotated[float, Field(ge=0)] | None = None
    model: Model
    fits: bool
    devices: Annotated[list[Device], Field(min_length=1, max_length=64)]
    pools: Pools
    limits: Limits
    what_fits: Annotated[list[Cell], Field(max_length=1000)] = []
    hit: Hit | None
    nodes: list[Segment]
    misses: dict[MissReason, Share]
    miss_counts: dict[MissReason, Count] = {}
    evicted: Evicted = Evicted(snapshots=0, kv_blocks=0)
    warnings: Annotated[list[Sentence], Field(max_length=100)] = []
    advice: Annotated[list[Sentence], Field(max_length=100)] = []

    @model_validator(mode="after")
    def _is_a_tree(self) -> Self:
        ends = {0: 0}
        for node in self.nodes:
            if node.id in ends or node.id == 0 or node.parent not in ends:
                raise ValueError(f"node {node.id} does not come after its parent {node.parent}")
            if node.start != ends[node.parent] or node.end <= node.start:
                raise ValueError(f"node {node.id} does not begin where its parent ends")
            if node.snapshot not in (None, node.end):
                raise ValueError(f"node {node.id} has a snapshot elsewhere than at its end")
            ends[node.id] = node.end
        return self

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if set(self.misses) != set(self.miss_counts):
            raise ValueError("misses and miss_counts name different reasons")
        places = {(cell.max_num_seqs, cell.max_model_len) for cell in self.what_fits}
        counts, lengths = {count for count, _ in places}, {length for _, length in places}
        if len(places) != len(counts) * len(lengths):
            raise ValueError("what_fits has gaps")
        return self


def as_document(document: Document) -> dict[str, Any]:
    """Make the plain form that views render: a missing value is left out where that says more."""
    plain = document.model_dump()
    for device in plain["devices"]:
        for row in device["rows"]:
            if document.hit is None:
                del row["measured"]
    for node in plain["nodes"]:
        if node["text"] is None:
            del node["text"]
    return plain
