"""Hashes of token blocks, chained: a block's hash stands for all tokens from the beginning to its end."""

from collections.abc import Sequence
from hashlib import blake2b

_DIGEST_BYTES = 16


def root_hash(model_id: str) -> bytes:
    """What the hash of a first block is chained to: so that models never share an entry."""
    return blake2b(model_id.encode(), digest_size=_DIGEST_BYTES).digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The hash of a block whose tokens follow those that `parent` stands for."""
    digest = blake2b(parent, digest_size=_DIGEST_BYTES)
    digest.update(b"".join(token_id.to_bytes(8, "little") for token_id in token_ids))
    return digest.digest()
