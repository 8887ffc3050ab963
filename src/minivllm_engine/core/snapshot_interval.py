"""The snapshot interval: where the delta rule's chunks and the KV blocks both end."""

from math import lcm

DELTA_RULE_CHUNK = 64


def snapshot_interval(block_size: int) -> int:
    """Return tokens from one boundary to the next: snapshots lie on them, and reuse comes in such units."""
    return lcm(block_size, DELTA_RULE_CHUNK)
