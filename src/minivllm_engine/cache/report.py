"""What the prefix cache holds and what it was good for, as plain data: counts and hashes, and token ids."""

from collections.abc import Iterator
from dataclasses import dataclass

from minivllm_engine.cache.node import Node
from minivllm_engine.cache.prefix_cache import PrefixCache
from minivllm_engine.core.stats import EngineStats


@dataclass(frozen=True, slots=True)
class CacheSegment:
    """Cached blocks in a row that were used alike: the tokens `start` to `end` of a prefix.

    A segment ends where the cache branches, where a snapshot lies, or where the use differs.

    Attributes:
        id: from 1, parents before children; `parent` is 0 where the segment begins at the first token.
        hits: requests that found it.
        recomputed: those of them that computed its tokens again, since no state after it was there.
        refs: requests that hold it now.
        snapshot: position of the state at its end; None where there is none.
        age: requests that have started since it was found last, or made.
        hash: of all tokens from the first to `end`, in hexadecimal digits.
        token_ids: of the segment alone.
    """

    id: int
    parent: int
    start: int
    end: int
    blocks: int
    hits: int
    recomputed: int
    refs: int
    snapshot: int | None
    age: int
    hash: str
    token_ids: tuple[int, ...]

    @property
    def recomputed_tokens(self) -> int:
        return self.recomputed * (self.end - self.start)


@dataclass(frozen=True, slots=True)
class CacheReport:
    """The prefix cache at one moment.

    Attributes:
        requests: that have started, each once; `stats` counts their tokens.
        segments: a tree, parents before children.
    """

    requests: int
    stats: EngineStats
    segments: tuple[CacheSegment, ...]


def cache_report(cache: PrefixCache, stats: EngineStats) -> CacheReport:
    """Return the report of a cache whose counters `stats` has. Changes nothing."""
    return CacheReport(cache.num_requests, stats, tuple(_segments(cache)))


def _segments(cache: PrefixCache) -> Iterator[CacheSegment]:
    # Depth first with a stack: a chain is as long as a prompt has blocks.
    number = 0
    below = [(0, node) for node in reversed(cache.roots())]
    while below:
        parent, first = below.pop()
        number += 1
        chain = _chain(first)
        last = chain[-1]
        yield _segment(cache, number, parent, chain)
        below += [(number, child) for child in reversed(last.children.values())]


def _chain(first: Node) -> list[Node]:
    """`first` and what follows it in the same segment."""
    chain = [first]
    while chain[-1].snapshot is None and len(chain[-1].children) == 1:
        (child,) = chain[-1].children.values()
        if (child.hits, child.recomputed) != (first.hits, first.recomputed):
            break
        chain.append(child)
    return chain


def _segment(cache: PrefixCache, number: int, parent: int, chain: list[Node]) -> CacheSegment:
    first, last = chain[0], chain[-1]
    return CacheSegment(
        id=number,
        parent=parent,
        start=first.end - len(first.token_ids),
        end=last.end,
        blocks=len(chain),
        hits=first.hits,
        recomputed=first.recomputed,
        refs=cache.blocks.num_holders(first.block),
        snapshot=None if last.snapshot is None else last.end,
        age=cache.num_starts - max(node.last_use for node in chain),
        hash=last.hash.hex(),
        token_ids=tuple(token for node in chain for token in node.token_ids),
    )
