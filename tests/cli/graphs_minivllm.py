"""The program `minivllm` as if it ran on a GPU: the plan is one of a GPU, the load report tells of graphs.

GRAPH_BYTES is what they hold. The model runs on the CPU all the same.
"""

import os
from dataclasses import replace
from typing import Any

from minivllm_cli import engine
from minivllm_cli.config.settings import Settings
from minivllm_cli.main import main
from minivllm_engine.core.stats import LoadReport
from minivllm_engine.memory.devices import DeviceMemory, host_memory
from minivllm_engine.memory.plan import plan_memory
from minivllm_engine.memory.sizes import graph_sizes

_GPU = DeviceMemory("cuda", "GPU", 2 << 30)
_prepare = engine.prepare_model


def _prepare_model(settings: Settings) -> Any:
    prepared = _prepare(settings)
    tied = prepared.index.seems_tied(prepared.model_config)
    config = settings.engine_config
    plan = plan_memory(prepared.model_config, config, _GPU, tied=tied)
    return replace(prepared, plan=plan)


def _open_engine(prepared: Any, progress: Any = None) -> Any:
    from minivllm_engine.llm import LLM

    class WithGraphs(LLM):
        @property
        def load_report(self) -> LoadReport:
            plan = prepared.plan
            sizes = graph_sizes(plan.max_graph_batch)
            return LoadReport(
                0.1, 0.2, 0.3, sizes, int(os.environ["GRAPH_BYTES"]), plan.graph_bytes
            )

    cpu = {"device": host_memory(), "max_graph_batch": 0}
    small = replace(prepared.plan, max_num_seqs=4, num_blocks=64, num_snapshots=4, **cpu)
    return WithGraphs(replace(prepared, plan=small), progress=progress)


if __name__ == "__main__":
    engine.prepare_model = _prepare_model
    engine.open_engine = _open_engine
    main()
