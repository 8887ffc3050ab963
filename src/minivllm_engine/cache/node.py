"""A cached block, and its hash, which is chained: it stands for all tokens from the beginning to its end."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

_DIGEST_BYTES = 16


def root_hash(model_id: str) -> bytes:
    """Return what the hash of a first block is chained to: so that models never share an entry."""
    return blake2b(model_id.encode(), digest_size=_DIGEST_BYTES).digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the hash of a block whose tokens follow those that `parent` stands for."""
    digest = blake2b(parent, digest_size=_DIGEST_BYTES)
    digest.update(b"".join(token_id.to_bytes(8, "little") for token_id in token_ids))
    return digest.digest()


@dataclass(slots=True, eq=False)
class Node:
    """One cached block: the KV of its tokens, and perhaps the state after the last of them.

    Attributes:
        end: tokens from the beginning to the block's end.
        answer_at: where the answer began in the chat whose request computed this block, or None.
        hits: requests that found it.
        recomputed: those of them that computed it again all the same, for want of a state after it.
        last_use: how many requests had started when it was found last, or else made.
        in_answer: the request that computed this block got tokens of it as its answer.
        branch_point: requests with other prompts have gone on from here.
        saves: tokens that its snapshot saves, from the one above that stands while this one does.
        superseded: the conversation that its snapshot is of has gone on from there to another one.
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
    in_answer: bool = False
    branch_point: bool = False
    saves: int = 0
    superseded: bool = False
    children: dict[bytes, "Node"] = field(default_factory=dict)

    def latest_children(self) -> Iterator["Node"]:
        """Iterate over the children, from the one made last."""
        return reversed(self.children.values())
