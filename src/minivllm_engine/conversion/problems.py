"""What forbids a conversion: told once for all layers that share it, with the names that may be meant."""

import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from minivllm_engine.checkpoint.mismatch import is_beyond, layers_of
from minivllm_engine.checkpoint.names import EMBEDDING, HEAD, bare_name
from minivllm_engine.checkpoint.rules import CANONICAL, FOREIGN, TensorRule
from minivllm_engine.conversion.layouts import Layouts
from minivllm_engine.conversion.naming import NamedTensor
from minivllm_engine.conversion.options import ConvertOptions, Renames
from minivllm_engine.conversion.patterns import (
    LONGEST,
    filled_pattern,
    glob_of,
    matches,
    mistake_in_pair,
    nearest,
    pattern_of,
    placeholders,
)
from minivllm_engine.conversion.plan import PROBLEM_WORDS, Piece, Problem, ProblemKind
from minivllm_engine.conversion.styles import find_rule
from minivllm_engine.core.escape import escape, listed

KNOWN_NAMES = {
    f"layers.*.{rule.tensor}" if rule.in_layer else rule.tensor: rule
    for rule in (*FOREIGN, *CANONICAL)
}
# Patterns of names for which nearest ones are looked for: a source of noise is not worth more time.
_MOST_PATTERNS = 200
_MOST_CANDIDATES = 12  # mappings that are worth a try
# Names that tell a prefix from a slip of the pen.
_LEAST_WITH_PREFIX = 2

OTHER_CONFIG = "--model-config FILE with the config.json that was saved with these weights"
_TIED = '"tie_word_embeddings": true in config.json, if the head is the embedding'
_KIND_WORDS = {"linear": "linear_attention", "attention": "full_attention"}


@dataclass(frozen=True)
class Outcome:
    """What matching gave, for `find_problems`.

    Attributes:
        tensors: all of the source.
        pieces: what becomes of those that rules know.
        unmatched: those that none knows, with the reason where it is not the name.
        passed_over: those that `allow_unmatched` leaves out.
        misshapen: (name, first target, shape, shape that the config asks for) of each such tensor.
        wrong_layers: see `layer_problems`.
        tied: the head is the embedding.
    """

    tensors: Sequence[NamedTensor]
    pieces: Sequence[Piece]
    unmatched: Sequence[tuple[NamedTensor, str]]
    passed_over: Sequence[NamedTensor]
    misshapen: Sequence[tuple[str, str, tuple[int, ...], tuple[int, ...]]]
    wrong_layers: Mapping[int | None, Problem]
    tied: bool

    @property
    def strays(self) -> list[NamedTensor]:
        """Tensors that nothing is made of because of their names alone."""
        return [*(tensor for tensor, why in self.unmatched if not why), *self.passed_over]


def find_problems(
    outcome: Outcome, layouts: Layouts, options: ConvertOptions
) -> tuple[tuple[Problem, ...], tuple[Renames, ...]]:
    """Find all that is wrong, and whole mappings that may mend some of it: to be tried, not told."""
    holes, shared, given = _gaps(outcome, layouts, options)
    blamed = _blamed_lines(outcome.tensors, holes, layouts)
    problems = (
        *outcome.wrong_layers.values(),
        *_unmatched(outcome, with_holes=bool(holes)),
        *_wrong_shapes(outcome),
        *_two_sources(shared),
        *_missing(outcome, holes, given, blamed),
    )
    lines = dict.fromkeys(blamed.values())
    candidates: list[Renames] = [
        tuple(pair for pair in options.renames if pair[0] != line) for line in lines
    ]
    strays = _groups(outcome.strays)
    if holes and strays:
        candidates += [(line, *options.renames) for line in _new_lines(strays, holes, layouts)]
    return problems, tuple(candidates[:_MOST_CANDIDATES])


def layer_problems(tensors: Iterable[NamedTensor], layouts: Layouts) -> dict[int | None, Problem]:
    """Find layers that hold the other kind of mixer than config.json says."""
    kinds: defaultdict[int, set[str]] = defaultdict(set)
    for tensor in tensors:
        rule = None if tensor.dropped else find_rule(tensor, layouts.styles)
        if rule and tensor.bare.layer is not None:
            kinds[tensor.bare.layer] |= {block.split(".")[0] for block in rule.blocks}
    problems: dict[int | None, Problem] = {}
    for layer in range(layouts.config.num_hidden_layers):
        held = sorted(kinds[layer] & {"linear", "attention"})
        wanted = "attention" if layouts.config.is_attention(layer) else "linear"
        if held and held != [wanted]:
            words = " and ".join(_KIND_WORDS[kind] for kind in held)
            problems[layer] = Problem(
                "layers",
                f"model.layers.{layer}",
                detail=f"holds {words}, config.json says {_KIND_WORDS[wanted]}",
                remedy=f"{OTHER_CONFIG}, or correct its layer_types",
            )
    return problems


def why_unmatched(rule: TensorRule | None, layer: int | None, layouts: Layouts) -> str:
    """Say what is wrong with a tensor, where it is not its name."""
    if is_beyond(layer, layouts.config):
        return layers_of(layouts.config)
    return "" if rule is None else "config.json has no such part"


def _gaps(
    outcome: Outcome, layouts: Layouts, options: ConvertOptions
) -> tuple[dict[str, str], dict[str, list[str]], set[str]]:
    """(targets that lack rows, with those rows; targets that two sources give, with these; those that
    have any source)."""
    pieces: defaultdict[str, list[Piece]] = defaultdict(list)
    for piece in outcome.pieces:
        pieces[piece.target].append(piece)
    skipped = tuple(f"model.layers.{layer}." for layer in outcome.wrong_layers) or "\0"
    holes: dict[str, str] = {}
    shared: dict[str, list[str]] = {}
    for name, shape in layouts.expected.items():
        if (outcome.tied and name == HEAD) or name.startswith(skipped):
            continue
        rows, twice = _gaps_of(pieces[name], shape[0])
        if twice:
            shared[name] = twice
        elif rows and (pieces[name] or not matches(name, options.allow_missing)):
            holes[name] = rows
    return holes, shared, {name for name, found in pieces.items() if found}


def _gaps_of(pieces: Iterable[Piece], rows: int) -> tuple[str, list[str]]:
    """Rows of a target that no piece gives, in words, and all sources of rows that two give."""
    runs = sorted((run, piece.source) for piece in pieces for run in piece.target_rows.runs())
    holes: list[tuple[int, int]] = []
    shared: dict[str, None] = {}
    end, last = 0, ""
    for (start, stop), source in [*runs, ((rows, rows), "")]:
        if start < end:
            shared |= dict.fromkeys((last, source))
        if start > end:
            holes.append((end, start))
        if stop > end:
            end, last = stop, source
    shown = ", ".join(f"{start}:{stop}" for start, stop in holes[:3])
    return shown + (f" and {len(holes) - 3} more" if len(holes) > 3 else ""), list(shared)


def _unmatched(outcome: Outcome, *, with_holes: bool) -> Iterator[Problem]:
    def detail(tensor: NamedTensor, why: str) -> str:
        if why or tensor.renamed_by is None:
            return why
        return (
            f"--mapping calls it {escape(pattern_of(tensor.bare.canonical))}, which no rule knows"
        )

    told = {tensor.entry.name: detail(tensor, why) for tensor, why in outcome.unmatched}
    bare = {tensor.entry.name: str(tensor.bare) for tensor, _ in outcome.unmatched}
    for number, (problem, names) in enumerate(_grouped("unmatched", told.items())):
        if problem.detail:
            config_is_wrong = not problem.detail.startswith("--mapping")
            remedy = OTHER_CONFIG if config_is_wrong else "correct that line of --mapping"
            yield replace(problem, remedy=remedy)
            continue
        near = nearest(pattern_of(bare[names[0]]), KNOWN_NAMES) if number < _MOST_PATTERNS else ()
        remedy = f"--mapping FILE with a line that says what {escape(problem.name)} is"
        if not with_holes:
            glob = shlex.quote(glob_of(problem.name, problem.count))
            remedy += f"; or, if the model is the same without it: --allow-unmatched {glob}"
        yield replace(problem, nearest=near, remedy=remedy)


def _wrong_shapes(outcome: Outcome) -> Iterator[Problem]:
    by_remedy: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    for name, target, shape, wanted in outcome.misshapen:
        detail, remedy = (
            f"is {escape(list(shape))}, config.json asks for {list(wanted)}",
            OTHER_CONFIG,
        )
        if target in (EMBEDDING, HEAD) and len(shape) == 2 and shape[1:] == wanted[1:]:
            remedy = f'"vocab_size": {shape[0]} in config.json, or {OTHER_CONFIG}'
        elif target.endswith("conv1d.weight") and shape == (wanted[0], max(wanted[1:])):
            detail += ": where the third dimension was would tell how norms are stored"
            remedy = "save it as [channels, 1, kernel], by tensor.unsqueeze(1), from where it was [.., 1, ..]"
        by_remedy[remedy].append((name, detail))
    for remedy, named in by_remedy.items():
        for problem, _ in _grouped("wrong_shape", named):
            yield replace(problem, remedy=remedy)


def _two_sources(shared: Mapping[str, list[str]]) -> Iterator[Problem]:
    groups: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, sources in shared.items():
        groups[pattern_of(name), *map(pattern_of, sources)].append(name)
    for (pattern, *_), names in groups.items():
        by_pattern: defaultdict[str, list[str]] = defaultdict(list)
        for source in dict.fromkeys(source for name in names for source in shared[name]):
            by_pattern[pattern_of(source)].append(source)
        given = [filled_pattern(alike, some) for alike, some in by_pattern.items()]
        yield Problem(
            "two_sources",
            filled_pattern(pattern, names),
            len(names),
            "given by "
            + (" and by ".join(map(escape, given)) if len(given) == 2 else listed(given)),
            remedy="--mapping FILE with a line SOURCE: null for each source but the right one",
        )


def _missing(
    outcome: Outcome, holes: Mapping[str, str], given: set[str], blamed: Mapping[str, str]
) -> Iterator[Problem]:
    drops = {t.renamed_by for t in outcome.tensors if t.dropped == "rename"}
    strays = outcome.strays
    others = list(dict.fromkeys(pattern_of(t.entry.name) for t in strays[:_MOST_PATTERNS]))
    # A head that lies there under a name that nobody knows is no copy of the embedding.
    may_be_tied = not strays and not any(
        tensor.dropped == "peft-original" for tensor in outcome.tensors
    )
    named = []
    for name in sorted(holes, key=lambda name: name in given):
        detail = f"rows {holes[name]} have no source" if name in given else ""
        if name in blamed:
            does = "drops it" if blamed[name] in drops else "makes something else of it"
            detail = f"the line {escape(repr(blamed[name]))} of --mapping {does}"
        elif name == HEAD and may_be_tied:
            detail = (
                'if the head is the embedding, config.json must say "tie_word_embeddings": true'
            )
        named.append((name, detail))
    for number, (problem, names) in enumerate(_grouped("missing", named)):
        near: tuple[tuple[str, int], ...] = ()
        remedy = f"a source that holds {problem.name}"
        if names[0] in blamed:
            remedy = f"correct the line {escape(repr(blamed[names[0]]))} of --mapping"
        elif names[0] in given:
            remedy = f"a source that holds all parts of {escape(problem.name)}"
        elif problem.detail:
            remedy = _TIED
        elif strays:
            near = nearest(pattern_of(names[0]), others) if number < _MOST_PATTERNS else ()
        yield replace(problem, nearest=near, remedy=remedy)


def _blamed_lines(
    tensors: Iterable[NamedTensor], holes: Mapping[str, str], layouts: Layouts
) -> dict[str, str]:
    """Targets that lack rows because a line of the mapping took them away, each with the line."""
    blamed: dict[str, str] = {}
    for tensor in tensors:
        if tensor.renamed_by is None:
            continue
        own = replace(tensor, bare=bare_name(tensor.entry.name), dropped=None)
        for target in _targets(find_rule(own, layouts.styles), own, own.bare.layer, layouts):
            if target in holes:
                blamed[target] = tensor.renamed_by
    return blamed


def _targets(
    rule: TensorRule | None, tensor: NamedTensor, layer: int | None, layouts: Layouts
) -> list[str]:
    """What `tensor` would become under `rule`, if it has the shape for it."""
    if rule is None or rule.in_layer != (layer is not None):
        return []
    if layouts.source_shape(rule, layer) != tensor.entry.shape:
        return []
    return list(dict.fromkeys(layouts.target_name(block, layer) for block in rule.blocks))


def _groups(tensors: Iterable[NamedTensor]) -> dict[str, list[NamedTensor]]:
    """Tensors by the pattern of their stored names."""
    groups: defaultdict[str, list[NamedTensor]] = defaultdict(list)
    for tensor in tensors:
        groups[pattern_of(tensor.entry.name)].append(tensor)
    return dict(groups)


def _new_lines(
    strays: Mapping[str, Sequence[NamedTensor]], holes: Mapping[str, str], layouts: Layouts
) -> Iterator[tuple[str, str]]:
    """Lines of a mapping for unknown names: by another beginning, by the nearest name, by the only shape."""
    prefixes: Counter[tuple[str, str]] = Counter()
    for pattern in strays:
        before, number, _ = pattern.partition(".*.")
        prefixes[pattern.partition(".")[0], "**"] += 1
        prefixes[before, "layers.**"] += bool(number)
    for (prefix, target), count in prefixes.most_common(4):
        if count >= _LEAST_WITH_PREFIX and _can_stand(f"{prefix}.**", target):
            yield f"{prefix}.**", target
    fits: dict[str, dict[str, set[str]]] = {}
    near: dict[str, dict[str, set[str]]] = {}
    for pattern in list(strays)[:_MOST_PATTERNS]:
        fits[pattern] = fitting = _fitting(strays[pattern], holes, layouts)
        found = [
            (distance, name)
            for name, distance in nearest(pattern_of(str(strays[pattern][0].bare)), KNOWN_NAMES)
            if name in fitting
        ]
        # One that is nearly as near could be meant as well.
        sure = found and (len(found) == 1 or found[0][0] + 1 < found[1][0])
        near[pattern] = {found[0][1]: fitting[found[0][1]]} if sure else {}
        if len(strays[pattern][0].entry.shape) < 2:
            fits[pattern] = {}  # a vector of hidden_size could be any norm
    for claims in (near, fits):
        for pattern, known in claims.items():
            given = [targets for claim in claims.values() for targets in claim.values()]
            for name, targets in known.items():
                only = len(known) == 1 and sum(bool(targets & other) for other in given) == 1
                if only and _can_stand(pattern, name):
                    yield pattern, name


def _fitting(
    tensors: Sequence[NamedTensor], holes: Mapping[str, str], layouts: Layouts
) -> dict[str, set[str]]:
    """Known names that all of `tensors` have the shapes for, with the targets without a source that they
    would become."""
    fitting: dict[str, set[str]] = {}
    for known, rule in KNOWN_NAMES.items():
        targets: set[str] = set()
        for tensor in tensors:
            own = tensor.bare.layer
            layer = own if own is not None else bare_name(tensor.entry.name).layer
            given = _targets(rule, tensor, layer, layouts)
            if not given or not set(given) <= holes.keys() - targets:
                break
            targets |= set(given)
        else:
            fitting[known] = targets
    return fitting


def _can_stand(source: str, target: str) -> bool:
    """May it be a line of a mapping, and would anybody copy it?"""
    return (
        len(source) <= LONGEST
        and source.isprintable()
        and placeholders(target) <= placeholders(source)
        and mistake_in_pair(source, target) is None
    )


def _grouped(
    kind: ProblemKind, named: Iterable[tuple[str, str]]
) -> Iterator[tuple[Problem, list[str]]]:
    """One problem for all of (name, detail) that share a pattern and a detail, with their names."""
    groups: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for name, detail in named:
        groups[pattern_of(name), detail].append(name)
    for (pattern, detail), names in groups.items():
        yield Problem(kind, filled_pattern(pattern, names), len(names), detail), names


def counted(problems: Iterable[Problem]) -> list[str]:
    """Count the tensors of each kind of problem: ["1 unmatched", "2 missing"]."""
    counts = counts_of(problems)
    return [f"{counts[kind]:,} {words}" for kind, words in PROBLEM_WORDS.items() if counts[kind]]


def counts_of(problems: Iterable[Problem]) -> Counter[ProblemKind]:
    """Count the tensors that each kind of problem concerns."""
    counts: Counter[ProblemKind] = Counter()
    for problem in problems:
        counts[problem.kind] += problem.count
    return counts
