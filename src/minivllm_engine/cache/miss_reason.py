"""Why a request did not find more in the prefix cache."""

from collections.abc import Container, Iterable, Sequence
from itertools import islice

from minivllm_engine.cache.node import Node
from minivllm_engine.core.outputs import Divergence, MissReason
from minivllm_engine.core.request import Request

# An earlier turn of a chat is looked for among so many of the latest that begin alike: a file of
# thousands of prompts must not be compared with itself.
_MAX_COMPARED = 32


def explain_miss(
    request: Request,
    path: Sequence[Node],
    start: int,
    *,
    interval: int,
    next_hash: bytes | None,
    evicted: Container[bytes],
) -> tuple[MissReason | None, Divergence | None]:
    """Tell the reason, and where a chat's template is to blame; None where nothing more could be reused.

    Args:
        path: the root, and the nodes that were found behind it.
        start: where the request can start from.
        next_hash: of the first block that was not found; None where the prompt has no more.
        evicted: hashes of blocks and snapshots that were given up lately.
    """
    best = (request.num_reusable - 1) // interval * interval
    if best <= 0:
        return "below_granularity", None
    if start == best:
        return None, None
    if path[-1].end // interval * interval > start:
        dropped = any(node.hash in evicted for node in path if node.end > start)
        return ("evicted" if dropped else "no_snapshot"), None
    if next_hash is not None and next_hash in evicted:
        return "evicted", None
    if request.answer_at is None:
        return "new_prefix", None
    divergence = _divergence(request, path[-1].end, path[-1].latest_children())
    return ("new_prefix" if divergence is None else "template_divergence"), divergence


def _divergence(request: Request, begin: int, children: Iterable[Node]) -> Divergence | None:
    """Where a chat leaves a cached one after the beginning of its answer, and so tells it otherwise."""
    best: Divergence | None = None
    for child in islice(children, _MAX_COMPARED):
        pairs = zip(child.token_ids, request.token_ids(begin, child.end), strict=False)
        at = next((i for i, (cached, own) in enumerate(pairs) if cached != own), None)
        if at is None or child.answer_at is None or begin + at < child.answer_at:
            continue
        if best is None or begin + at > best.position:
            own = request.token_ids(begin + at, begin + at + 1)[0]
            best = Divergence(begin + at, child.token_ids[at], own)
    return best
