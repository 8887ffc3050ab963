"""The tree of cached blocks, with the snapshots that hang on some of them: structure, no policy."""

from collections import OrderedDict
from collections.abc import Iterator

from minivllm_engine.cache.block_manager import BlockManager
from minivllm_engine.cache.deltanet_state import DeltaNetStateManager, SnapshotTag
from minivllm_engine.cache.node import Node, block_hash, root_hash


class PrefixTree:
    """Nodes by hash, by block and by snapshot, kept in agreement with the two managers.

    A block that goes takes what builds on it along, snapshots included; a snapshot that goes leaves the
    block. Hashes of what was evicted are remembered for a while, so that a miss can be explained.

    Args:
        model_id: the model and the dtypes of its cache; part of every hash and tag.
    """

    def __init__(self, blocks: BlockManager, states: DeltaNetStateManager, model_id: str) -> None:
        self.root = Node(root_hash(model_id), None, -1, (), 0)
        self.evicted: OrderedDict[bytes, None] = OrderedDict()
        self._blocks, self._states, self._model_id = blocks, states, model_id
        self._nodes: dict[bytes, Node] = {}
        self._by_block: dict[int, Node] = {}
        self._by_snapshot: dict[int, Node] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def find(self, hash_: bytes) -> Node | None:
        return self._nodes.get(hash_)

    def holds(self, block: int) -> bool:
        """Say whether the content of `block` is in the tree."""
        return block in self._by_block

    def walk(self) -> Iterator[Node]:
        """Yield all nodes, parents before children."""
        below = list(self.root.children.values())
        while below:
            node = below.pop()
            yield node
            below += node.children.values()

    def tag(self, node: Node) -> SnapshotTag:
        """Return what a snapshot at `node` is the state of."""
        return SnapshotTag(self._model_id, node.end, node.hash)

    # -- adding ----------------------------------------------------------------------------------

    def add(self, node: Node) -> None:
        """Keep a block that somebody holds."""
        assert node.parent is not None
        self._blocks.mark_cached(node.block)
        node.parent.children[node.hash] = node
        self._nodes[node.hash] = self._by_block[node.block] = node
        self.evicted.pop(node.hash, None)

    def attach_snapshot(self, node: Node, snapshot: int, tokens_saved: float) -> None:
        """Enter a reserved snapshot that has been written: the state after `node`."""
        self._states.store_snapshot(snapshot, self.tag(node), tokens_saved)
        node.snapshot, node.superseded = snapshot, False
        self._by_snapshot[snapshot] = node
        self.evicted.pop(node.hash, None)

    # -- giving up -------------------------------------------------------------------------------

    def evict_oldest(self) -> None:
        """Evict the block that has been idle longest. There is one."""
        node = self._by_block[self._blocks.oldest_idle()]
        self._remember(node)
        self.remove(node)

    def evict_cheapest_snapshot(self) -> bool:
        """Give up the snapshot that saves least. False where none is stored."""
        snapshot = self._states.cheapest_snapshot()
        if snapshot is None:
            return False
        self.evict_snapshot(self._by_snapshot[snapshot])
        return True

    def evict_snapshot(self, node: Node) -> None:
        """Give up a node's snapshot because another needs the room. Its KV stays."""
        assert node.snapshot is not None
        self._remember(node)
        del self._by_snapshot[node.snapshot]
        self._states.evict_snapshot(node.snapshot)
        node.snapshot = None

    def free_snapshot(self, node: Node) -> None:
        """Give up a node's snapshot because it is worth nothing any more."""
        assert node.snapshot is not None
        del self._by_snapshot[node.snapshot]
        self._states.free_snapshot(node.snapshot)
        node.snapshot = None

    def remove(self, node: Node) -> None:
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
                self.free_snapshot(gone)
            self._blocks.drop_cached(gone.block)

    def clear(self) -> None:
        """Remove everything, the memory of what was evicted too."""
        for node in list(self.root.children.values()):
            self.remove(node)
        self.evicted.clear()

    def _remember(self, node: Node) -> None:
        self.evicted[node.hash] = None
        self.evicted.move_to_end(node.hash)
        if len(self.evicted) > 4 * self._blocks.num_blocks:
            self.evicted.popitem(last=False)

    # -- integrity -------------------------------------------------------------------------------

    def check_integrity(self, interval: int) -> None:
        """Prove that the tree, the blocks and the snapshots agree."""
        blocks, reached = self._blocks, list(self.walk())
        assert len(reached) == len(self._nodes), "a node cannot be reached"
        assert {n.block for n in reached} == set(self._by_block), "blocks disagree with the nodes"
        assert blocks.num_cached == len(reached), "cached blocks disagree with the nodes"
        stored = {n.snapshot: n for n in reached if n.snapshot is not None}
        assert stored == self._by_snapshot, "snapshots disagree with the nodes"
        assert len(stored) == self._states.num_stored, "a stored snapshot belongs to no node"
        for node in reached:
            assert self._nodes[node.hash] is node and self._by_block[node.block] is node
            assert node.parent is not None and node.parent.children[node.hash] is node
            assert block_hash(node.parent.hash, node.token_ids) == node.hash
            assert node.end == node.parent.end + blocks.block_size, "an entry of no length"
            if node.parent is not self.root and blocks.is_idle(node.parent.block):
                assert blocks.is_idle(node.block), "a held block builds on one that may go"
            if node.snapshot is not None:
                tag = self._states.tag_of(node.snapshot)
                assert tag == self.tag(node), "a snapshot is not what its node says"
                assert node.end % interval == 0, "a snapshot lies off the interval"
