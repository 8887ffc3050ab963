"""The command `bench`: from its options to a measurement or a comparison."""

import typer

from minivllm_cli.bench.flags import BenchFlags, check_keys
from minivllm_cli.command import Invocation, command
from minivllm_cli.config.flags import EngineFlags, ModelArgument
from minivllm_cli.console.streams import print_result

_FIGURES = """\
TTFT          time to first token: from a request's arrival to its first token
queue         the part of it before the first step that had the request
ITL           inter-token latency: each gap between two tokens of a request
TPOT          time per output token: (E2E - TTFT) / (tokens - 1); none for a
              single token
E2E           from a request's arrival to its last token
tok/s         tokens / wall time of the timed part: of a prefill its prompt
              tokens, of everything else its output tokens
in/out        tokens of a repetition as they were counted, all requests
limit         floor / measured time of a decode step. The floor is the bytes
              that a step must move (weights once, states read and written,
              keys and values read; from the model's config) / the speed at
              which this device reads memory, measured at the start
hit           share of the prompt tokens that came from the prefix cache.
              KV (kv_hit in JSON): their keys and values were there. used
              (prefix_hit): a state snapshot was there too, so that they were
              not computed
speed-up      tok/s of a variant / of the first variant, repetition by
              repetition: the median, ± half of the spread
tokens equal  requests that got the same greedy tokens in both variants. Those
              of stages sum in different orders, so in 16 bits near ties part
              them
pays back     seconds of graph capture / (eager ITL - graph ITL): decode steps
peak          bytes that tensors held at most in a repetition (CUDA only)

What is timed: of prefill, mixed, prefix and jsonl everything from the first
step to the last token; of decode only steps after all prompts are in the
cache, while all requests run side by side. naive computes all tokens before
each token again. cold does without the prefix cache, warm finds the shared
prefixes in it. Each sample starts from an empty cache, with prompts of fresh
random token ids. JSON has all samples, and mean, std and n beside percentiles.
"""


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
            print_result(_FIGURES)
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
        check_keys(settings, flags)
        if flags.compare is not None:
            from minivllm_cli.bench.compare import run_compare

            return run_compare(run, flags, output)
        from minivllm_cli.bench.session import run_bench
        from minivllm_cli.config.typed_options import remedies_as_typed

        with remedies_as_typed(settings):
            return run_bench(run, settings, flags)
