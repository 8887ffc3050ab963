"""The command `generate`: from its options to a run."""

import typer

from minivllm_cli.batch.flags import GenerateFlags
from minivllm_cli.command import Invocation, command
from minivllm_cli.config.flags import EngineFlags, ModelArgument, SamplingFlags, ThinkFlags
from minivllm_cli.generate.flag_checks import check_combination, check_thinking_flags


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""

    @command(app, "generate")
    def generate(
        run: Invocation,
        model: ModelArgument = None,
        *,
        flags: GenerateFlags,
        sampling: SamplingFlags,
        think: ThinkFlags,
        engine: EngineFlags,
    ) -> int:
        """Answer the prompts of a file or a pipe, or one from the command line.

        minivllm generate demo --prompt "Define aardvark."

        minivllm generate ./model --input prompts.jsonl --output out.jsonl

        cat prompts.jsonl | minivllm generate ./model -i - | jq -r '.outputs[0].text'
        """
        from minivllm_cli.startup import configure

        settings = configure(run, model, engine, sampling, as_json=flags.json_)
        if settings is None:
            return 0
        check_combination(flags)
        from minivllm_cli.batch.overrides import Overrides
        from minivllm_cli.config.typed_options import remedies_as_typed

        overrides = Overrides.read(flags, think)
        check_thinking_flags(flags, overrides.think)
        with remedies_as_typed(settings):
            if flags.streams_prompt and not flags.dry_run:
                from minivllm_cli.generate.one_prompt import stream_prompt

                return stream_prompt(run, settings, flags, overrides)
            from minivllm_cli.batch.run import run_batch

            return run_batch(run, settings, flags, overrides)
