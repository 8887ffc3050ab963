"""The way of one tensor through the rules."""

from dataclasses import dataclass

from minivllm_engine.conversion.plan import Plan


@dataclass(frozen=True, slots=True)
class Step:
    """One rule on the way. rule: "wrapper", "root", "rename", "style", "rows", "dtype", "shard" ...;
    text: what it did, such as "layers.0.attn.q_proj.weight -> rows 0:32 of ..."."""

    rule: str
    text: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """name: as in the file, or canonical. side: which of both it is ("source" or "target")."""

    name: str
    side: str
    steps: tuple[Step, ...]


def explain(plan: Plan, name: str) -> tuple[Explanation, ...]:
    """The rule chain of a source tensor, or where a target tensor comes from; a name that is both gives
    two explanations.

    Raises:
        CheckpointError: no tensor has this name; the nearest names are in its hint.
    """
    raise NotImplementedError
