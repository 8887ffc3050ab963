"""KV block ids: who holds which, which are cached, and how many can be had. Plain integers, no tensors."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockManager:
    """Hands out blocks of `block_size` tokens, counted by reference.

    Block ids run from 0 to num_blocks - 1. A block is free, or held by someone (count >= 1), or idle:
    nobody holds it, but its content is in the prefix cache and worth keeping until the room is needed.
    Idle blocks wait in the order in which they were last held.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Last freed, first taken: memory that was never touched need not be.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._cached: set[int] = set()
        self._ref_counts = [0] * num_blocks
        self.peak_used = 0

    @property
    def num_available(self) -> int:
        """Blocks that nobody holds: free ones, and idle ones, whose content would be given up."""
        return len(self._free) + len(self._idle)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - self.num_available

    @property
    def num_cached(self) -> int:
        """Blocks whose content is in the prefix cache, held or idle."""
        return len(self._cached)

    def blocks_for(self, num_tokens: int) -> int:
        """Return blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def num_holders(self, block: int) -> int:
        """Count the requests that hold the block."""
        return self._ref_counts[block]

    def is_idle(self, block: int) -> bool:
        return block in self._idle

    def oldest_idle(self) -> int:
        """Return the block that has been idle longest. There is one."""
        return next(iter(self._idle))

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, each with one reference. The caller has seen to it that they are free."""
        assert count <= len(self._free), f"{count} blocks asked for, {len(self._free)} free"
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._ref_counts[block] = 1
        self.peak_used = max(self.peak_used, self.num_used)
        return blocks

    def hold(self, blocks: Iterable[int]) -> None:
        """Take one more reference of each of these cached blocks."""
        for block in blocks:
            assert block in self._cached, f"block {block} is not cached"
            self._idle.pop(block, None)
            self._ref_counts[block] += 1
        self.peak_used = max(self.peak_used, self.num_used)

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference of each block of a sequence, which are named in its order.

        The last reference frees a block, or leaves it idle. The end of the sequence becomes idle before
        its beginning, so that what is given up first is what nothing else builds on.
        """
        for block in reversed(blocks):
            assert self._ref_counts[block] > 0, f"block {block} is released but not held"
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                if block in self._cached:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def mark_cached(self, block: int) -> None:
        """Note that the content of a held block is now in the prefix cache."""
        assert self._ref_counts[block] > 0 and block not in self._cached
        self._cached.add(block)

    def drop_cached(self, block: int) -> None:
        """Forget that the prefix cache knows the block's content; free the block if no request holds it."""
        self._cached.remove(block)
        if block in self._idle:
            del self._idle[block]
            self._free.append(block)

    def check_integrity(self, tables: Iterable[Iterable[int]]) -> None:
        """Prove that the block tables of all live requests account for every reference."""
        counts = [0] * self.num_blocks
        for table in tables:
            for block in table:
                assert 0 <= block < self.num_blocks, f"block {block} of {self.num_blocks}"
                counts[block] += 1
        assert counts == self._ref_counts, "reference counts disagree with the block tables"
        free, idle = set(self._free), set(self._idle)
        assert len(free) == len(self._free), "a block is free twice"
        held = {block for block, count in enumerate(counts) if count}
        assert not free & held, f"free and held: {sorted(free & held)}"
        assert not idle & held, f"idle and held: {sorted(idle & held)}"
        assert not free & self._cached, f"free and cached: {sorted(free & self._cached)}"
        assert idle <= self._cached, f"idle and not cached: {sorted(idle - self._cached)}"
        assert len(free) + len(idle) + len(held) == self.num_blocks, "a block is lost"
