"""What each stored snapshot is worth: the tokens that it saves, times the chance that they are asked for."""

from minivllm_engine.cache.deltanet_state import DeltaNetStateManager
from minivllm_engine.cache.prefix_tree import Node

# The chances are priors, beside 1 for a snapshot where its conversation is expected to go on; they were
# chosen on the loads of benchmarks/snapshot_eviction.py. Higher ones serve those who branch off a little
# better where there is much room (1/8 in place of 1/64: 2 %), and chats worse where there is little.
#
# Somebody goes back to where a conversation has gone on from: an earlier turn is taken back or forked.
_SUPERSEDED = 1 / 64
# A conversation goes on from its answer as it was computed, where nothing has shown that it does. A chat
# template that leaves out thinking tells the answer otherwise.
_UNTRIED_ANSWER = 1 / 16
# The latest answer is asked for again.
_ANSWERED_AGAIN = 1 / 16


class SnapshotWorth:
    """Tells the state manager what snapshots are worth, as requests leave and use them.

    A conversation leaves several snapshots a turn, and mostly comes back to one: the deepest. A snapshot
    that its conversation has gone on from, to one further down, is superseded: it is of use only to whoever
    branches off in between. A branch point is one where that has happened: a request with another
    prompt left the cached path there, or started there although it was superseded. It stands for itself.
    """

    def __init__(self, states: DeltaNetStateManager) -> None:
        self._states = states

    def of_prompt(self, node: Node) -> float:
        """Tokens that a new snapshot at `node` is worth, where a prompt was computed up to there."""
        self._supersede_above(node)
        return node.saves

    def of_answer(self, node: Node, *, goes_on: bool) -> float:
        """As `of_prompt`, where an answer was computed up to there.

        Args:
            goes_on: did the conversation go on from its last answer as that was computed?
        """
        above = _above(node)
        node.saves = node.end - above.end
        if above.snapshot is None:
            return node.saves
        if not goes_on:
            return node.saves * _UNTRIED_ANSWER
        # One of the two may have to do for both. Without this one, the answer is computed again; without
        # the one above, all of it is where another answer is asked for.
        if node.saves >= above.end * _ANSWERED_AGAIN:
            self._supersede_above(node)
        return node.saves

    def used(self, node: Node) -> None:
        """A request starts from the snapshot at `node`."""
        assert node.snapshot is not None
        if node.superseded:
            node.superseded, node.branch_point = False, True
        self._states.reweigh_snapshot(node.snapshot, node.saves)

    def _supersede_above(self, node: Node) -> None:
        # Ends at the first that is superseded: those above it were seen to then, and what it saves was
        # counted from the one that stands.
        above = _above(node)
        while above.snapshot is not None and not above.branch_point:
            if above.superseded:
                node.saves = node.end - above.end + above.saves
                return
            above.superseded = True
            # Those further up are stored too, so long as it is: a request falls back to the next.
            further = _above(above)
            self._states.reweigh_snapshot(above.snapshot, (above.end - further.end) * _SUPERSEDED)
            above = further
        node.saves = node.end - above.end


def _above(node: Node) -> Node:
    """The nearest node above with a snapshot, or else the root."""
    above = node.parent
    assert above is not None
    while above.parent is not None and above.snapshot is None:
        above = above.parent
    return above
