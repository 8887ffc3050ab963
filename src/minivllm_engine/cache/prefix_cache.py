"""Where KV blocks and DeltaNet snapshots agree: what a new request can start from, and what is kept."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from minivllm_engine.cache.block_manager import BlockManager
from minivllm_engine.cache.deltanet_state import DeltaNetStateManager
from minivllm_engine.cache.miss_reason import explain_miss
from minivllm_engine.cache.node import Node, block_hash
from minivllm_engine.cache.prefix_tree import PrefixTree
from minivllm_engine.cache.snapshot_eviction import SnapshotWorth
from minivllm_engine.core.outputs import CacheUse
from minivllm_engine.core.request import Request
from minivllm_engine.core.snapshot_interval import snapshot_interval

# Along one long prompt: at most so many snapshots.
_MAX_SPARSE = 8


@dataclass(frozen=True, slots=True)
class Match:
    """What the cache has for a request: `nodes` holds its KV, and from `start` on it must compute.

    `start` is the deepest boundary with a snapshot; the nodes reach further where there is none.
    """

    nodes: tuple[Node, ...]
    start: int
    use: CacheUse

    def held(self, block_size: int) -> tuple[Node, ...]:
        """Return the nodes that the request will hold."""
        return self.nodes[: self.start // block_size]


class PrefixCache:
    """What is kept, for whom and for how long, over a tree of cached blocks.

    A request may start at a boundary (a multiple of `interval`) before its last token where every block
    before it is cached and a snapshot of the state is stored: KV alone is never used. When a block is
    given up, what builds on it goes too, snapshots included; a snapshot that goes leaves the KV.

    Args:
        model_id: the model and the dtypes of its cache.
        enabled: off, nothing is ever kept or found.
        sparse_tokens: along one long prompt no snapshots are closer together than this. A prompt is cut
            into as many steps.
    """

    def __init__(
        self,
        blocks: BlockManager,
        states: DeltaNetStateManager,
        *,
        model_id: str = "",
        enabled: bool = True,
        sparse_tokens: int = 1024,
    ) -> None:
        self._sparse_tokens = sparse_tokens
        self.blocks, self.states = blocks, states
        self.enabled = enabled
        self.interval = snapshot_interval(blocks.block_size)
        self._tree = PrefixTree(blocks, states, model_id)
        self._worth = SnapshotWorth(states.reweigh_snapshot)
        self.num_starts = self.num_requests = 0
        self.num_evicted_blocks = 0
        self.prompt_tokens = self.cached_tokens = self.kv_matched_tokens = self.restored_tokens = 0
        self.misses: Counter[str] = Counter()

    # -- finding ---------------------------------------------------------------------------------

    def match(self, request: Request) -> Match:
        """Return the deepest boundary that `request` can start from. Changes nothing."""
        if not self.enabled or not request.params.prefix_cache:
            return Match((), 0, CacheUse(miss_reason="disabled"))
        size = self.blocks.block_size
        nodes: list[Node] = []
        for hash_ in self.hashes(request, max(request.num_reusable - 1, 0) // size):
            node = self._tree.find(hash_)
            if node is None:
                break
            nodes.append(node)
        start = next((n.end for n in reversed(nodes) if n.snapshot is not None), 0)
        count = len(nodes) + 1
        next_hash = self.hashes(request, count)[-1] if count * size <= request.num_tokens else None
        reason, divergence = explain_miss(
            request,
            [self._tree.root, *nodes],
            start,
            interval=self.interval,
            next_hash=next_hash,
            evicted=self._tree.evicted,
        )
        use = CacheUse(start, len(nodes) * size, start, reason, divergence)
        return Match(tuple(nodes), start, use)

    def start_from(self, request: Request, match: Match) -> int | None:
        """Let `request` hold what was matched. Returns the snapshot to restore, None for a cold start."""
        held = match.held(self.blocks.block_size)
        self.blocks.hold(node.block for node in held)
        request.block_table = [node.block for node in held]
        request.num_computed_tokens = match.start
        request.boundaries = self._boundaries(request, match)
        self.num_starts += request.counted
        for node in match.nodes:
            node.hits += 1
            node.recomputed += node.end > match.start
            node.last_use = self.num_starts
        self._learn(request, match)
        self._count(request, match.use)
        if not match.start:
            return None
        snapshot = held[-1].snapshot
        assert snapshot is not None
        self.states.use_snapshot(snapshot, self._tree.tag(held[-1]))
        self._worth.used(held[-1])
        return snapshot

    def _learn(self, request: Request, match: Match) -> None:
        """What a request says about those before it by where it leaves what they had."""
        if not match.nodes or request.cache_use is not None:
            return
        size, last = self.blocks.block_size, match.nodes[-1]
        block_follows = request.num_tokens >= last.end + size
        if block_follows and self._tree.find(self.hashes(request, last.end // size + 1)[-1]):
            return  # its last block is cached too: it leaves nothing
        other = next(last.latest_children(), None)
        request.goes_on = other is None and block_follows
        # In an answer it is the same conversation that goes on otherwise, not another one.
        boundary = last.end // self.interval * self.interval
        if other is not None and not other.in_answer and boundary:
            match.nodes[boundary // size - 1].branch_point = True

    def _count(self, request: Request, use: CacheUse) -> None:
        is_first = request.cache_use is None
        if is_first:
            request.cache_use = use
        if not request.counted:
            return
        if not is_first or request.index:
            self.restored_tokens += use.cached_tokens
        else:
            self.num_requests += 1
            self.prompt_tokens += len(request.prompt_ids)
            self.cached_tokens += use.cached_tokens
            self.kv_matched_tokens += use.kv_matched
            if use.miss_reason is not None:
                self.misses[use.miss_reason] += 1

    def hashes(self, request: Request, count: int) -> Sequence[bytes]:
        """Return the chained hashes of the request's first `count` blocks, all of whose tokens are known."""
        size, known = self.blocks.block_size, request.block_hashes
        while len(known) < count:
            start = len(known) * size
            parent = known[-1] if known else self._tree.root.hash
            known.append(block_hash(parent, request.token_ids(start, start + size)))
        return known[:count]

    def shared_boundary(self, request: Request, other: Request) -> int:
        """Return the last boundary up to which two prompts are the same, and before the end of either."""
        own = min(len(request.prompt_ids), request.num_reusable)
        last = max(min(own, len(other.prompt_ids)) - 1, 0)
        count = last // self.blocks.block_size
        pairs = zip(self.hashes(request, count), self.hashes(other, count), strict=True)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), count)
        return same * self.blocks.block_size // self.interval * self.interval

    def _boundaries(self, request: Request, match: Match) -> list[int]:
        """Where this request's prefill shall leave snapshots, ascending.

        The last boundary before the end, where a repeat resumes; before the answer's opening in a
        chat, where the next turn resumes; where the request leaves what is cached; a sparse series.
        """
        if not self.enabled or not request.params.prefix_cache:
            return []
        last = max(request.num_reusable - 1, 0) // self.interval * self.interval
        wanted = {last, match.use.kv_matched // self.interval * self.interval}
        if request.answer_at is not None:
            wanted.add(request.answer_at // self.interval * self.interval)
        spacing = max(self._sparse_tokens, request.num_tokens // _MAX_SPARSE)
        spacing = -(-spacing // self.interval) * self.interval
        wanted.update(range(spacing, last, spacing))
        return sorted(b for b in wanted if match.start < b <= last)

    # -- keeping ---------------------------------------------------------------------------------

    def allocate(self, count: int) -> list[int]:
        """Take blocks for a request; idle ones are given up where free ones do not suffice.

        The caller has seen that so many are available.
        """
        while self.blocks.num_free < count:
            self._tree.evict_oldest()
            self.num_evicted_blocks += 1
        return self.blocks.allocate(count)

    def reserve_snapshot(self, request: Request, end: int) -> int | None:
        """Reserve a snapshot for the state of `request` after `end` tokens, if that is worth one.

        None where it is there already, or where all snapshots are being written.
        """
        if not self.enabled or not request.params.prefix_cache or end % self.interval:
            return None
        if end <= request.num_tokens:  # else nobody knows yet what it will be the state of
            node = self._tree.find(self.hashes(request, end // self.blocks.block_size)[-1])
            if node is not None and node.snapshot is not None:
                return None
        snapshot = self.states.reserve_snapshot()
        if snapshot is None and self._tree.evict_cheapest_snapshot():
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
        node = self._tree.find(self.hashes(request, end // self.blocks.block_size)[-1])
        if node is None or node.snapshot is not None:
            self.states.free_snapshot(snapshot)
            return
        if end >= len(request.prompt_ids):
            self._replace_rolling(request, node)
            worth = self._worth.of_answer(node, goes_on=request.goes_on)
        else:
            worth = self._worth.of_prompt(node)
        self._tree.attach_snapshot(node, snapshot, worth)

    def _keep_blocks(self, request: Request, end: int) -> None:
        size, table = self.blocks.block_size, request.block_table
        count = end // size
        hashes = self.hashes(request, count)
        for i in range(request.num_kept_blocks, count):
            parent = self._tree.find(hashes[i - 1]) if i else self._tree.root
            if parent is None or (i and parent.block != table[i - 1]):
                return  # what it builds on was forgotten meanwhile, and is not to be relied on
            node = self._tree.find(hashes[i])
            if node is None:
                ids = tuple(request.token_ids(i * size, (i + 1) * size))
                node = Node(hashes[i], parent, table[i], ids, (i + 1) * size, request.answer_at)
                node.last_use = self.num_starts
                node.in_answer = node.end > len(request.prompt_ids)
                self._tree.add(node)
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
            self._tree.free_snapshot(old)

    # -- giving up -------------------------------------------------------------------------------

    def forget(self, request: Request) -> None:
        """Drop what `request` has computed, and all that builds on it: it may be wrong."""
        if request.cache_use is None:
            return
        size = self.blocks.block_size
        first = request.cache_use.cached_tokens // size
        for hash_ in request.block_hashes[first:]:
            node = self._tree.find(hash_)
            if node is not None:
                self._tree.remove(node)
                return

    def clear(self) -> None:
        """Drop everything. Running requests go on; what they hold is no longer found."""
        self._tree.clear()

    # -- looking ---------------------------------------------------------------------------------

    @property
    def num_nodes(self) -> int:
        return len(self._tree)

    def roots(self) -> list[Node]:
        """Return the first blocks of all that is cached, oldest first."""
        return list(self._tree.root.children.values())

    def walk(self) -> Iterator[Node]:
        """Yield all nodes, parents before children."""
        return self._tree.walk()

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Prove that the tree is sound, and that requests hold the blocks of their own tokens."""
        self._tree.check_integrity(self.interval)
        for request in requests:
            for i in range(request.num_kept_blocks):
                node = self._tree.find(request.block_hashes[i])
                held = request.block_table[i]
                kept = node is not None and node.block == held
                assert kept or not self._tree.holds(held), "a wrong block is held"
