"""From a source to a plan."""

from pathlib import Path

from minivllm_engine.conversion.options import ConvertOptions
from minivllm_engine.conversion.plan import Plan
from minivllm_engine.conversion.source import Source


def plan_conversion(
    source: Source, options: ConvertOptions | None = None, *, dst: str | Path | None = None
) -> Plan:
    """Decide from headers alone what becomes of every tensor. Loads no torch, writes nothing.

    A plan with problems is returned, not raised: it is there to be shown. Where a head may be a copy of
    the embedding, the plan takes it for one; `convert` compares them and plans again if they differ.

    Args:
        dst: only for the free space there, in `Plan.needs`.

    Raises:
        CheckpointError: a config of another family or one that contradicts itself.
    """
    raise NotImplementedError
