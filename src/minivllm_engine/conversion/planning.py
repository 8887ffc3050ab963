"""From a source to a plan."""

import math
import shutil
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from minivllm_engine.checkpoint.locate import expanded
from minivllm_engine.checkpoint.mismatch import MANIFEST
from minivllm_engine.checkpoint.names import EMBEDDING, HEAD
from minivllm_engine.checkpoint.safetensors_header import FLOAT_TYPES, TensorEntry
from minivllm_engine.conversion.layouts import Layouts
from minivllm_engine.conversion.matching import (
    Match,
    Matching,
    check_types,
    is_protected,
    match_tensors,
)
from minivllm_engine.conversion.naming import NamedTensor, name_tensors
from minivllm_engine.conversion.options import ConvertOptions
from minivllm_engine.conversion.patterns import matches
from minivllm_engine.conversion.plan import (
    LONG_DTYPES,
    SHORT_DTYPES,
    Needs,
    Plan,
    Shard,
    TargetTensor,
    file_name,
)
from minivllm_engine.conversion.source import Source
from minivllm_engine.conversion.styles import recognise
from minivllm_engine.conversion.summary import plan_notes, table_rows
from minivllm_engine.conversion.target_config import adapt_config, target_config
from minivllm_engine.core.errors import CheckpointError
from minivllm_engine.core.escape import listed
from minivllm_engine.core.units import count_text
from minivllm_engine.model_config.config import ModelConfig


def target_tensors(
    found: Iterable[Match], layouts: Layouts, options: ConvertOptions
) -> tuple[TargetTensor, ...]:
    """Return every target that a match gives something of, in the order of the model."""
    dtypes: defaultdict[str, set[str]] = defaultdict(set)
    fp32: set[str] = set()
    for match in found:
        for piece in match.pieces:
            dtypes[piece.target].add(SHORT_DTYPES[match.tensor.entry.dtype])
            # 1 + w in 16 bits is exact in fp32 only after 1 is taken off.
            if is_protected(match.rule) or piece.transform == "minus_one":
                fp32.add(piece.target)
    targets = []
    for name, shape in layouts.expected.items():
        if name not in dtypes:
            continue
        kept = name in fp32
        dtype = "fp32" if kept else _dtype(dtypes[name], len(shape), options)
        size = math.prod(shape) * FLOAT_TYPES[LONG_DTYPES[dtype]]
        targets.append(TargetTensor(name, dtype, shape, size, kept))
    return tuple(targets)


def main_dtype(targets: Iterable[TargetTensor]) -> str:
    """Return the type that most bytes are stored in."""
    sizes: defaultdict[str, int] = defaultdict(int)
    for target in targets:
        sizes[target.dtype] += target.num_bytes
    return max(sizes, key=lambda dtype: sizes[dtype], default="fp32")


def split_shards(targets: Iterable[TargetTensor], max_bytes: int) -> tuple[Shard, ...]:
    """Fill files with whole tensors, in order, up to `max_bytes` each.

    In a file, wide types come first: so every tensor is aligned, as readers that map it want.
    """
    files: list[list[TargetTensor]] = []
    room = 0
    for target in targets:
        if target.num_bytes > room or not files:
            files.append([])
            room = max_bytes
        files[-1].append(target)
        room -= target.num_bytes
    return tuple(
        Shard(
            file_name(i, len(files)),
            tuple(
                t.name for t in sorted(tensors, key=lambda t: -FLOAT_TYPES[LONG_DTYPES[t.dtype]])
            ),
            sum(t.num_bytes for t in tensors),
        )
        for i, tensors in enumerate(files)
    )


def _dtype(given: set[str], num_dims: int, options: ConvertOptions) -> str:
    if options.dtype != "keep" and num_dims > 1:
        return options.dtype
    if len(given) == 1:
        return next(iter(given))
    return "fp64" if "fp64" in given else "fp32"


# What Python, torch and the buffers of a conversion take beside the tensors at hand: measured 250 MiB.
_BASE_MEMORY = 320 << 20
# Shard headers, config, manifest and index, per tensor; generous.
_HEADER_BYTES = 1024


def plan_conversion(
    source: Source, options: ConvertOptions | None = None, *, dst: str | Path | None = None
) -> Plan:
    """Decide from headers alone what becomes of every tensor. Loads no torch, writes nothing.

    A plan with problems is returned, not raised: it is there to be shown. Where a head may be a copy of
    the embedding, the plan takes it for one; `convert` compares them and plans again if they differ.

    Args:
        dst: only for the free space there, in `Plan.needs`.

    Raises:
        CheckpointError: a config of another family or one that contradicts itself, or nothing
            but parts that are left out.
    """
    return _plan(source, options or ConvertOptions(), dst, head_differs=False)


def plan_with_own_head(plan: Plan, dst: str | Path) -> Plan:
    """Plan the same for a head that turned out not to be the embedding."""
    return _plan(plan.source, plan.options, dst, head_differs=True)


def replanned(plan: Plan, options: ConvertOptions) -> Plan:
    """Plan the same under other options.

    Raises:
        CheckpointError: as `plan_conversion`.
    """
    return _plan(plan.source, options, None, head_differs=plan.head_differs)


def heads_in_question(plan: Plan) -> list[tuple[TensorEntry, TensorEntry]]:
    """Return each head that is dropped as a copy, with the embedding that it has to equal."""
    entries = {entry.name: entry for entry in plan.source.tensors}
    embedding = next((p.source for p in plan.pieces if p.target == EMBEDDING), None)
    if embedding is None:
        return []
    heads = [tensor.source for tensor in plan.dropped if tensor.rule == "tied-head"]
    return [(entries[head], entries[embedding]) for head in heads]


def _plan(
    source: Source, options: ConvertOptions, dst: str | Path | None, *, head_differs: bool
) -> Plan:
    _check_layout_options(source, options)
    named = name_tensors(source.tensors, options.renames)
    text = [tensor for tensor in named if not tensor.dropped]
    if not text:
        raise _nothing_left(source, named)
    styles = recognise(text, source.config, options)
    adapted = adapt_config(source.config, str(source.config_file), styles.active)
    config = ModelConfig.from_dict(adapted, source=str(source.config_file))
    layouts = Layouts.of(config, styles.active)
    tied = config.tie_word_embeddings and not head_differs
    matching = match_tensors(named, layouts, options, tied=tied)
    check_types(source, matching)
    if not matching.matches and not matching.problems:
        raise _nothing_known(source)
    targets = target_tensors(matching.matches, layouts, options)
    shards = split_shards(targets, options.max_shard_bytes)
    missing = _left_missing(matching, options, layouts)
    bytes_head = _bytes_of_head(matching, targets)
    used = sum(match.tensor.entry.num_bytes for match in matching.matches)
    return Plan(
        source=source,
        options=options,
        style=tuple(sorted(styles.active | _prefix_style(named))),
        rows=table_rows(matching.matches, matching.dropped, targets),
        problems=(*styles.problems, *matching.problems),
        candidates=matching.candidates,
        pieces=tuple(piece for match in matching.matches for piece in match.pieces),
        targets=targets,
        dropped=matching.dropped,
        shards=shards,
        config=target_config(
            adapted, config, str(source.config_file), tied=tied, dtype=main_dtype(targets)
        ),
        notes=(
            *source.notes,
            *styles.notes,
            *plan_notes(source, named, layouts, options, missing, head_differs=head_differs),
        ),
        bytes_in=used,
        bytes_out=sum(target.num_bytes for target in targets),
        bytes_head=bytes_head,
        missing=missing,
        needs=_needs(source, matching.matches, targets, shards, bytes_head, dst),
        head_differs=head_differs,
    )


def _nothing_left(source: Source, named: list[NamedTensor]) -> CheckpointError:
    """All tensors are dropped: by rules for other parts, or by lines of a mapping."""
    blamed = dict.fromkeys(t.renamed_by for t in named if t.renamed_by is not None)
    what = f"{source.path} holds no text tensor"
    if not blamed:
        return CheckpointError(
            what,
            why=f"of its {count_text(len(named), 'tensor')} all belong to parts that are left out",
            hint="Use the whole checkpoint.",
        )
    count = sum(tensor.renamed_by is not None for tensor in named)
    return CheckpointError(
        f"{what} once --mapping is applied",
        why=f"of its {count_text(len(named), 'tensor')} it drops {count:,}: {listed(map(repr, blamed))}",
        hint="Correct these lines of --mapping, or leave them out.",
    )


def _nothing_known(source: Source) -> CheckpointError:
    names = [entry.name for entry in source.tensors]
    return CheckpointError(
        f"{source.path} holds no tensor of this model",
        why=f"no rule knows any of its {count_text(len(names), 'name')}, such as {listed(names, 2)}",
        hint="Use a checkpoint of this family, or say with --mapping FILE what its tensors are.",
    )


def free_space(path: Path) -> int:
    """Count the bytes free where `path` is, or will be."""
    path = expanded(path).absolute()
    while path != path.parent:
        try:
            return shutil.disk_usage(path).free
        except OSError:  # not there, or a name that nothing can have
            path = path.parent
    return shutil.disk_usage(path).free


def _prefix_style(named: list[NamedTensor]) -> set[str]:
    return {"multimodal"} if any(tensor.dropped == "text-only" for tensor in named) else {"text"}


def _check_layout_options(source: Source, options: ConvertOptions) -> None:
    """A source that was converted before says so, and its rows are not taken apart a second time."""
    manifest = source.directory / MANIFEST
    if options.q_gate_layout == "halves" and manifest.is_file():
        raise CheckpointError(
            f"{source.directory} was written by convert-weights: its q_proj is per-head already",
            why=f"{manifest.name} is there, and q_gate_layout is 'halves'",
            hint="Leave the layout out.",
        )


def _left_missing(matching: Matching, options: ConvertOptions, layouts: Layouts) -> tuple[str, ...]:
    given = {piece.target for match in matching.matches for piece in match.pieces}
    tied = any(tensor.rule == "tied-head" for tensor in matching.dropped)
    wanted = [n for n in layouts.expected if n not in given and not (tied and n == HEAD)]
    if layouts.config.tie_word_embeddings and HEAD in wanted:
        wanted.remove(HEAD)
    return tuple(name for name in wanted if matches(name, options.allow_missing))


def _bytes_of_head(matching: Matching, targets: tuple[TargetTensor, ...]) -> int:
    """What a head that is dropped as a copy of the embedding would take: as much as that does."""
    embedding = next((target for target in targets if target.name == EMBEDDING), None)
    dropped = any(tensor.rule == "tied-head" for tensor in matching.dropped)
    return embedding.num_bytes if embedding and dropped else 0


def _needs(
    source: Source,
    found: tuple[Match, ...],
    targets: tuple[TargetTensor, ...],
    shards: tuple[Shard, ...],
    bytes_head: int,
    dst: str | Path | None,
) -> Needs:
    side = sum(file.stat().st_size for file in source.side_files)
    out = sum(shard.num_bytes for shard in shards) + len(targets) * _HEADER_BYTES + side
    # The files fill up anew with the head in them: it may lie in the largest one.
    out += bytes_head
    largest_shard = max((shard.num_bytes for shard in shards), default=0) + bytes_head
    return Needs(
        disk=out + largest_shard,
        disk_free=None if dst is None else free_space(Path(dst)),
        ram=_BASE_MEMORY + _tensor_memory(found, targets),
    )


def _tensor_memory(found: tuple[Match, ...], targets: tuple[TargetTensor, ...]) -> int:
    """The most that is held at a time: one target, and beside it one source that it is made of, unless
    that is the target as it stands."""
    by_name = {target.name: target for target in targets}
    most = 0
    for match in found:
        entry = match.tensor.entry
        for piece in match.pieces:
            target = by_name[piece.target]
            stands = len(match.pieces) == 1 and (SHORT_DTYPES[entry.dtype], entry.num_bytes) == (
                target.dtype,
                target.num_bytes,
            )
            most = max(most, target.num_bytes + (0 if stands else entry.num_bytes))
    return most
