"""Conversion of any checkpoint of this family into one clean one: safetensors under canonical names.

    source = open_source("./src")
    plan = plan_conversion(source, ConvertOptions(dtype="bf16"), dst="./dst")
    report = convert(plan, "./dst")
    assert check(source, "./dst").ok

Opening safetensors, planning and explaining load no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minivllm_engine.conversion.converting import convert
    from minivllm_engine.conversion.explaining import Explanation, Step, explain
    from minivllm_engine.conversion.options import ConvertOptions
    from minivllm_engine.conversion.plan import Needs, Plan, Problem, Row
    from minivllm_engine.conversion.planning import plan_conversion
    from minivllm_engine.conversion.report import Cast, Difference, Progress, Report, ShardReport
    from minivllm_engine.conversion.source import Source, open_source
    from minivllm_engine.conversion.verify import CheckReport, check

_HOME = {
    "Cast": "report",
    "CheckReport": "verify",
    "ConvertOptions": "options",
    "Difference": "report",
    "Explanation": "explaining",
    "Needs": "plan",
    "Plan": "plan",
    "Problem": "plan",
    "Progress": "report",
    "Report": "report",
    "Row": "plan",
    "ShardReport": "report",
    "Source": "source",
    "Step": "explaining",
    "check": "verify",
    "convert": "converting",
    "explain": "explaining",
    "open_source": "source",
    "plan_conversion": "planning",
}

__all__ = [
    "Cast",
    "CheckReport",
    "ConvertOptions",
    "Difference",
    "Explanation",
    "Needs",
    "Plan",
    "Problem",
    "Progress",
    "Report",
    "Row",
    "ShardReport",
    "Source",
    "Step",
    "check",
    "convert",
    "explain",
    "open_source",
    "plan_conversion",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
