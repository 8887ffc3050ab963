"""The ways in which one workload is run, to be compared with each other."""

from dataclasses import dataclass, replace

from minivllm_cli.bench.workload import Workload


@dataclass(frozen=True, slots=True)
class Variant:
    """One way.

    Attributes:
        name: as it stands in results.
        graph: decode steps are replayed from CUDA graphs.
        cache: prefixes are reused, and primed where the workload shares some.
        naive: no KV cache: every token computes all tokens before it again.
    """

    name: str
    graph: bool = False
    cache: bool = True
    naive: bool = False


EAGER, GRAPH = Variant("eager"), Variant("graph", graph=True)


def variants_of(workload: Workload, variants: tuple[Variant, ...]) -> tuple[Variant, ...]:
    """List the variants of a workload: each twice where it is about the cache, the cold one first."""
    if not workload.with_and_without_cache:
        return variants
    return tuple(
        replace(variant, name=f"{variant.name} {name}", cache=cache)
        for variant in variants
        for name, cache in (("cold", False), ("warm", True))
    )
