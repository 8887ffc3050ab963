"""The command `bench`: from its options to a measurement or a comparison."""

import typer

from minivllm_cli.bench.flags import BenchFlags
from minivllm_cli.command import Invocation, command
from minivllm_cli.config.flags import EngineFlags, ModelArgument
from minivllm_cli.console.streams import print_result


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""

    @command(app, "bench")
    def bench(
        run: Invocation, model: ModelArgument = None, *, flags: BenchFlags, engine: EngineFlags
    ) -> int:
        """Measure how fast a model runs here, or compare two runs that were saved.

        minivllm bench demo

        minivllm bench --shape 0.8b --workload decode --batch 1,32,256 --save new.json

        minivllm bench --compare base.json new.json --fail-if-slower 3%
        """
        if flags.help_metrics:
            from minivllm_cli.bench.metrics import METRICS

            print_result(METRICS)
            return 0
        flags.check(model)
        output = flags.output_format
        from minivllm_cli.startup import configure

        measures = flags.compare is None
        settings = configure(
            run,
            model,
            engine,
            flags,
            runs_model=measures and flags.shape is None,
            as_json=flags.json_,
        )
        if settings is None:
            return 0
        if flags.compare is not None:
            from minivllm_cli.bench.compare import run_compare

            return run_compare(run, flags, output)
        from minivllm_cli.bench.session import run_bench
        from minivllm_cli.config.typed_options import remedies_as_typed

        with remedies_as_typed(settings):
            return run_bench(run, settings, flags)
