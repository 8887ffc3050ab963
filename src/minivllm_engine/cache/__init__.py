"""KV blocks, state slots and snapshots as ids: what can be reused."""
