"""KV block ids: who holds which, and how many are free. Plain integers, no tensors."""

from collections import deque
from collections.abc import Iterable


class BlockManager:
    """Hands out blocks of `block_size` tokens, counted by reference.

    Block ids run from 0 to num_blocks - 1. A block is free (count 0) or held (count >= 1).
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = deque(range(num_blocks))
        self._ref_counts = [0] * num_blocks
        self.peak_used = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def can_allocate(self, count: int) -> bool:
        return count <= len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, each with one reference. The caller has asked `can_allocate`."""
        assert self.can_allocate(count), f"{count} blocks asked for, {len(self._free)} free"
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._ref_counts[block] = 1
        self.peak_used = max(self.peak_used, self.num_used)
        return blocks

    def release(self, blocks: Iterable[int]) -> None:
        """Give back one reference of each block; the last one frees it."""
        for block in blocks:
            assert self._ref_counts[block] > 0, f"block {block} is released but not held"
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free.append(block)

    def check_integrity(self, tables: Iterable[Iterable[int]]) -> None:
        """Prove that the block tables of all live requests account for every reference."""
        counts = [0] * self.num_blocks
        for table in tables:
            for block in table:
                assert 0 <= block < self.num_blocks, f"block {block} of {self.num_blocks}"
                counts[block] += 1
        assert counts == self._ref_counts, "reference counts disagree with the block tables"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        held = {block for block, count in enumerate(counts) if count}
        assert not free & held, f"free and held: {sorted(free & held)}"
        assert len(free) + len(held) == self.num_blocks, "a block is neither free nor held"
