"""Where KV blocks and DeltaNet snapshots agree: what a new request can start from, and what is kept."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import lcm

from minivllm_engine.block_hash import block_hash, root_hash
from minivllm_engine.block_manager import BlockManager
from minivllm_engine.deltanet_state import DeltaNetStateManager, SnapshotTag
from minivllm_engine.request import CacheUse, Divergence, MissReason, Request

DELTA_RULE_CHUNK = 64
# Along one long prompt: at most so many snapshots, and none closer together than this.
_MAX_SPARSE = 8
_SPARSE_TOKENS = 1024
# An earlier turn of a chat is looked for among so many of the latest that begin alike: a file of
# thousands of prompts must not be compared with itself.
_MAX_COMPARED = 32


@dataclass(slots=True, eq=False)
class Node:
    """One cached block: the KV of its tokens, and perhaps the state after the last of them.

    Attributes:
        end: tokens from the beginning to the block's end.
        answer_at: where the answer began in the chat whose request computed this block, or None.
        hits: requests that found it.
        recomputed: those of them that computed it again all the same, for want of a state after it.
        last_use: how many requests had started when it was found last, or else made.
    """

    hash: bytes
    parent: "Node | None"
    block: int
    token_ids: tuple[int, ...]
    end: int
    answer_at: int | None = None
    snapshot: int | None = None
    hits: int = 0
    recomputed: int = 0
    last_use: int = 0
    children: dict[bytes, "Node"] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Match:
    """What the cache has for a request: `nodes` holds its KV, and from `start` on it must compute.

    `start` is the deepest boundary with a snapshot; the nodes reach further where there is none.
    """

    nodes: tuple[Node, ...]
    start: int
    use: CacheUse

    def held(self, block_size: int) -> tuple[Node, ...]:
        """The nodes that the request will hold."""
        return self.nodes[: self.start // block_size]


class PrefixCache:
    """A tree of cached blocks over the block manager's and the state manager's ids.

    A request may start at a boundary (a multiple of `grid`) before its last token where every block
    before it is cached and a snapshot of the state is stored: KV alone is never used. When a block is
    given up, what builds on it goes too, snapshots included; a snapshot that goes leaves the KV.

    Args:
        model_id: the model and the dtypes of its cache.
        enabled: off, nothing is ever kept or found.
    """

    def __init__(
        self,
        blocks: BlockManager,
        states: DeltaNetStateManager,
        *,
        model_id: str = "",
        enabled: bool = True,
    ) -> None:
        self.blocks, self.states = blocks, states
        self.model_id, self.enabled = model_id, enabled
        self.grid = lcm(blocks.block_size, DELTA_RULE_CHUNK)
        self._root = Node(root_hash(model_id), None, -1, (), 0)
        self._nodes: dict[bytes, Node] = {}
        self._by_block: dict[int, Node] = {}
        self._by_snapshot: dict[int, Node] = {}
        self._evicted: OrderedDict[bytes, None] = OrderedDict()
        self.num_starts = self.num_requests = 0
        self.num_evicted_blocks = 0
        self.prompt_tokens = self.cached_tokens = self.kv_matched_tokens = self.restored_tokens = 0
        self.misses: Counter[str] = Counter()

    # -- finding ---------------------------------------------------------------------------------

    def match(self, request: Request) -> Match:
        """The deepest boundary that `request` can start from. Changes nothing."""
        if not self.enabled or not request.params.prefix_cache:
            return Match((), 0, CacheUse(miss_reason="disabled"))
        size = self.blocks.block_size
        nodes: list[Node] = []
        for hash_ in self.hashes(request, (request.num_tokens - 1) // size):
            node = self._nodes.get(hash_)
            if node is None:
                break
            nodes.append(node)
        start = next((n.end for n in reversed(nodes) if n.snapshot is not None), 0)
        reason, divergence = self._miss(request, nodes, start)
        use = CacheUse(start, len(nodes) * size, start, reason, divergence)
        return Match(tuple(nodes), start, use)

    def start_from(self, request: Request, match: Match) -> int | None:
        """Let `request` hold what was matched. Returns the snapshot to restore, None for a cold start."""
        held = match.held(self.blocks.block_size)
        self.blocks.hold(node.block for node in held)
        request.block_table = [node.block for node in held]
        request.num_computed_tokens = match.start
        request.boundaries = self._boundaries(request, match)
        self.num_starts += 1
        for node in match.nodes:
            node.hits += 1
            node.recomputed += node.end > match.start
            node.last_use = self.num_starts
        self._count(request, match.use)
        if not match.start:
            return None
        snapshot = held[-1].snapshot
        assert snapshot is not None
        self.states.use_snapshot(snapshot, self._tag(match.start, held[-1].hash))
        return snapshot

    def _count(self, request: Request, use: CacheUse) -> None:
        if request.cache_use is not None or request.index:
            self.restored_tokens += use.cached_tokens
        else:
            self.num_requests += 1
            self.prompt_tokens += len(request.prompt_ids)
            self.cached_tokens += use.cached_tokens
            self.kv_matched_tokens += use.kv_matched
            if use.miss_reason is not None:
                self.misses[use.miss_reason] += 1
        if request.cache_use is None:
            request.cache_use = use

    def hashes(self, request: Request, count: int) -> Sequence[bytes]:
        """The chained hashes of the request's first `count` blocks, all of whose tokens are known."""
        size, known = self.blocks.block_size, request.block_hashes
        while len(known) < count:
            start = len(known) * size
            parent = known[-1] if known else self._root.hash
            known.append(block_hash(parent, request.token_ids(start, start + size)))
        return known[:count]

    def shared_boundary(self, request: Request, other: Request) -> int:
        """The last boundary up to which two prompts are the same, and before the end of either."""
        last = min(len(request.prompt_ids), len(other.prompt_ids)) - 1
        count = last // self.blocks.block_size
        pairs = zip(self.hashes(request, count), self.hashes(other, count), strict=True)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), count)
        return same * self.blocks.block_size // self.grid * self.grid

    def _boundaries(self, request: Request, match: Match) -> list[int]:
        """Where this request's prefill shall leave snapshots, ascending.

        The last boundary before the end, where a repeat resumes; before the answer's opening in a
        chat, where the next turn resumes; where the request leaves what is cached; a sparse grid.
        """
        if not self.enabled or not request.params.prefix_cache:
            return []
        last = (request.num_tokens - 1) // self.grid * self.grid
        wanted = {last, match.use.kv_matched // self.grid * self.grid}
        if request.answer_at is not None:
            wanted.add(request.answer_at // self.grid * self.grid)
        spacing = max(_SPARSE_TOKENS, request.num_tokens // _MAX_SPARSE)
        spacing = -(-spacing // self.grid) * self.grid
        wanted.update(range(spacing, last, spacing))
        return sorted(b for b in wanted if match.start < b <= last)

    def _miss(
        self, request: Request, nodes: list[Node], start: int
    ) -> tuple[MissReason | None, Divergence | None]:
        best = (request.num_tokens - 1) // self.grid * self.grid
        if best == 0:
            return "below_granularity", None
        if start == best:
            return None, None
        size = self.blocks.block_size
        boundary = len(nodes) * size // self.grid * self.grid
        if boundary > start:
            dropped = any(node.hash in self._evicted for node in nodes if node.end > start)
            return ("evicted" if dropped else "no_snapshot"), None
        if (len(nodes) + 1) * size <= request.num_tokens:
            next_hash = self.hashes(request, len(nodes) + 1)[-1]
            if next_hash in self._evicted:
                return "evicted", None
        divergence = self._divergence(request, nodes[-1] if nodes else self._root)
        return ("new_prefix" if divergence is None else "template_divergence"), divergence

    def _divergence(self, request: Request, node: Node) -> Divergence | None:
        """Where a chat leaves a cached one after the beginning of its answer, and so tells it otherwise."""
        if request.answer_at is None:
            return None
        ids = request.token_ids(node.end, node.end + self.blocks.block_size)
        best: Divergence | None = None
        for child in islice(reversed(node.children.values()), _MAX_COMPARED):
            pairs = zip(child.token_ids, ids, strict=False)
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
            if at is None or child.answer_at is None or node.end + at < child.answer_at:
                continue
            if best is None or node.end + at > best.position:
                best = Divergence(node.end + at, child.token_ids[at], ids[at])
        return best

    # -- keeping ---------------------------------------------------------------------------------

    def allocate(self, count: int) -> list[int]:
        """Blocks for a request; idle ones are given up where free ones do not suffice.

        The caller has seen that so many are available.
        """
        while self.blocks.num_free < count:
            node = self._by_block[self.blocks.oldest_idle()]
            self._remember_evicted(node.hash)
            self.num_evicted_blocks += 1
            self._remove(node)
        return self.blocks.allocate(count)

    def reserve_snapshot(self, request: Request, end: int) -> int | None:
        """A snapshot for the state of `request` after `end` tokens, if that is worth one.

        None where it is there already, or where all snapshots are being written.
        """
        if not self.enabled or not request.params.prefix_cache or end % self.grid:
            return None
        node = self._nodes.get(self.hashes(request, end // self.blocks.block_size)[-1])
        if node is not None and node.snapshot is not None:
            return None
        snapshot = self.states.reserve_snapshot()
        if snapshot is None:
            victim = self.states.cheapest_snapshot()
            if victim is None:
                return None
            self.drop_snapshot(self._by_snapshot[victim])
            snapshot = self.states.reserve_snapshot()
        return snapshot

    def commit(self, request: Request, end: int, snapshot: int | None) -> None:
        """`request` has computed its first `end` tokens, and its state went to `snapshot`, if any.

        Blocks that are full now are kept. Where another request has computed the same, `request`
        goes on with that block and gives up its own.
        """
        if self.enabled and request.params.prefix_cache:
            self._keep_blocks(request, end)
        if snapshot is None:
            return
        node = self._nodes.get(self.hashes(request, end // self.blocks.block_size)[-1])
        if node is None or node.snapshot is not None:
            self.states.free_snapshot(snapshot)
            return
        before = node.parent
        while before is not None and before.snapshot is None:
            before = before.parent
        saved = end - (0 if before is None else before.end)
        self.states.store_snapshot(snapshot, self._tag(end, node.hash), saved)
        node.snapshot = snapshot
        self._by_snapshot[snapshot] = node
        self._evicted.pop(node.hash, None)
        if end >= len(request.prompt_ids):
            self._replace_rolling(request, node)

    def _keep_blocks(self, request: Request, end: int) -> None:
        size, table = self.blocks.block_size, request.block_table
        count = end // size
        hashes = self.hashes(request, count)
        for i in range(request.num_kept_blocks, count):
            parent = self._nodes.get(hashes[i - 1]) if i else self._root
            if parent is None or (i and parent.block != table[i - 1]):
                return  # what it builds on was forgotten meanwhile, and is not to be relied on
            node = self._nodes.get(hashes[i])
            if node is None:
                ids = tuple(request.token_ids(i * size, (i + 1) * size))
                node = Node(hashes[i], parent, table[i], ids, (i + 1) * size, request.answer_at)
                node.last_use = self.num_starts
                self._add(node)
            elif node.block != table[i]:
                self.blocks.hold([node.block])
                self.blocks.release([table[i]])
                table[i] = node.block
            request.num_kept_blocks = i + 1

    def _replace_rolling(self, request: Request, node: Node) -> None:
        # An answer leaves a snapshot at every boundary, since nobody knows where it will end; only the
        # last is worth its room, unless another request was here in between.
        old = request.rolling_snapshot
        request.rolling_snapshot = node
        if old is not None and old.snapshot is not None and not old.hits:
            self._free_snapshot(old)

    def _add(self, node: Node) -> None:
        assert node.parent is not None
        self.blocks.mark_cached(node.block)
        node.parent.children[node.hash] = node
        self._nodes[node.hash] = self._by_block[node.block] = node
        self._evicted.pop(node.hash, None)

    # -- giving up -------------------------------------------------------------------------------

    def drop_snapshot(self, node: Node) -> None:
        """Evict a node's snapshot. Its KV stays."""
        assert node.snapshot is not None
        self._remember_evicted(node.hash)
        self.states.evict_snapshot(node.snapshot)
        del self._by_snapshot[node.snapshot]
        node.snapshot = None

    def forget(self, request: Request) -> None:
        """Drop what `request` has computed, and all that builds on it: it may be wrong."""
        if request.cache_use is None:
            return
        size = self.blocks.block_size
        first = request.cache_use.cached_tokens // size
        for hash_ in request.block_hashes[first:]:
            node = self._nodes.get(hash_)
            if node is not None:
                self._remove(node)
                return

    def clear(self) -> None:
        """Drop everything. Running requests go on; what they hold is no longer found."""
        for node in list(self._root.children.values()):
            self._remove(node)
        self._evicted.clear()

    def _remove(self, node: Node) -> None:
        """Take a node and all below it out of the tree."""
        assert node.parent is not None
        del node.parent.children[node.hash]
        below = [node]
        while below:
            gone = below.pop()
            below += gone.children.values()
            del self._nodes[gone.hash]
            del self._by_block[gone.block]
            if gone.snapshot is not None:
                self._free_snapshot(gone)
            self.blocks.drop_cached(gone.block)

    def _free_snapshot(self, node: Node) -> None:
        assert node.snapshot is not None
        del self._by_snapshot[node.snapshot]
        self.states.free_snapshot(node.snapshot)
        node.snapshot = None

    def _remember_evicted(self, hash_: bytes) -> None:
        self._evicted[hash_] = None
        self._evicted.move_to_end(hash_)
        if len(self._evicted) > 4 * self.blocks.num_blocks:
            self._evicted.popitem(last=False)

    def _tag(self, position: int, prefix: bytes) -> SnapshotTag:
        return SnapshotTag(self.model_id, position, prefix)

    # -- looking ---------------------------------------------------------------------------------

    @property
    def num_nodes(self) -> int:
        return len(self._nodes)

    def roots(self) -> list[Node]:
        """The first blocks of all that is cached, oldest first."""
        return list(self._root.children.values())

    def walk(self) -> Iterator[Node]:
        """All nodes, parents before children."""
        below = list(self._root.children.values())
        while below:
            node = below.pop()
            yield node
            below += node.children.values()

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Prove that the tree, the blocks and the snapshots agree."""
        reached = list(self.walk())
        assert len(reached) == len(self._nodes), "a node cannot be reached"
        assert {n.block for n in reached} == set(self._by_block), "blocks disagree with the nodes"
        assert self.blocks.num_cached == len(reached), "cached blocks disagree with the nodes"
        stored = {n.snapshot: n for n in reached if n.snapshot is not None}
        assert stored == self._by_snapshot, "snapshots disagree with the nodes"
        assert len(stored) == self.states.num_stored, "a stored snapshot belongs to no node"
        for node in reached:
            assert self._nodes[node.hash] is node and self._by_block[node.block] is node
            assert node.parent is not None and node.parent.children[node.hash] is node
            assert block_hash(node.parent.hash, node.token_ids) == node.hash
            assert node.end == node.parent.end + self.blocks.block_size, "an entry of no length"
            if node.parent is not self._root and self.blocks.is_idle(node.parent.block):
                assert self.blocks.is_idle(node.block), "a held block builds on one that may go"
            if node.snapshot is not None:
                tag = self.states.tag_of(node.snapshot)
                assert tag == self._tag(node.end, node.hash), "a snapshot is not what its node says"
                assert node.end % self.grid == 0, "a snapshot lies off the grid"
        for request in requests:
            for i in range(request.num_kept_blocks):
                kept = self._by_block.get(request.block_table[i])
                assert kept is None or kept.hash == request.block_hashes[i], "a wrong block is held"
