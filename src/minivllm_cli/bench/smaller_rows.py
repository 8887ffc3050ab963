"""What to type instead of rows that are too large. Whatever is proposed was planned, and fits."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from minivllm_cli.bench.fitting import Misfit, misfit, row_name, sized
from minivllm_cli.bench.workload import USES, Workload
from minivllm_cli.config.bench_options import Length
from minivllm_cli.config.settings import Settings
from minivllm_cli.config.typed_options import option
from minivllm_cli.errors import CliError, ExitCode
from minivllm_engine.core.errors import ConfigError
from minivllm_engine.core.units import count_text, format_size
from minivllm_engine.memory.fit import Fit, Planner, largest


class DoesNotFit(CliError):
    """A row needs more memory than there is."""

    exit_code = ExitCode.DOES_NOT_FIT


@dataclass(frozen=True)
class TooLarge:
    """Rows that were asked for one by one, and do not fit.

    Args:
        settings: as they were set, before sizes were chosen for the rows.
        planner: for the model and the device at hand.
    """

    settings: Settings
    workloads: Sequence[Workload]
    planner: Planner

    @property
    def _positions(self) -> int:
        return self.planner.model.max_position_embeddings

    def error(self) -> CliError | None:
        """Make the error for the first row too many, with a hint where smaller ones would do, or None."""
        length = self.settings.get("engine.max_model_len")
        if length is not None and length > self._positions:
            return None  # no row is to blame, and every plan would look for other lengths
        found = next(filter(None, map(self._misfit_of, range(1, len(self.workloads) + 1))), None)
        if found is None:
            return None
        hint = self._more_tokens() or self._smaller(found)
        kind = DoesNotFit if found.is_memory else CliError
        return kind(found.what, why=found.why, hint=hint)

    def _misfit_of(self, count: int) -> Misfit | None:
        """What is wrong with the last of so many rows, those before it being right."""
        workloads = self.workloads[:count]
        last = workloads[-1]
        result = self._plan(workloads)
        if result is None or result.ok:
            return None if result is None else misfit(result.plan, self._positions, last)
        plan = result.plan
        return Misfit(
            f"{row_name(last)}: {count_text(plan.max_num_seqs, 'state slot')} "
            f"({format_size(plan.state_bytes)}) and KV blocks for {plan.max_model_len:,} tokens",
            f"all pools together get {format_size(max(plan.memory, 0))}",
            ("batch", "depth", "prompt_len", "gen_len"),
            is_memory=True,
        )

    def _plan(self, workloads: Sequence[Workload], settings: Settings | None = None) -> Fit | None:
        """The engine for these rows; None where its settings cannot be."""
        settings = self.settings if settings is None else settings
        try:
            return self.planner(sized(settings, workloads, self._positions).engine_config)
        except ConfigError:
            return None

    def _fits(self, workloads: Sequence[Workload], settings: Settings | None = None) -> bool:
        result = self._plan(workloads, settings)
        positions = self._positions
        return (
            result is not None
            and result.ok
            and not any(misfit(result.plan, positions, workload) for workload in workloads)
        )

    def _more_tokens(self) -> str | None:
        """A step that holds the largest batch, where it is only that."""
        key, most = "engine.max_num_batched_tokens", max(w.batch for w in self.workloads)
        if most <= (self.settings.get(key) or most):
            return None
        settings = self.settings.with_value(key, most)
        return f"--set {key}={most}" if self._fits(self.workloads, settings) else None

    def _smaller(self, found: Misfit) -> str | None:
        """One option to type instead, with the largest value that fits."""
        own = USES[self.workloads[0].kind]
        for key in found.keys:
            if key in own and (most := self._largest(key)) is not None:
                values = dict.fromkeys(_text(row, key) for row in self._capped(key, most))
                return option_text(self.settings, key, ",".join(values))
        return None

    def _largest(self, key: str) -> int | None:
        most = max(_value(workload, key) for workload in self.workloads)
        return largest(lambda cap: self._fits(self._capped(key, cap)), most - 1)

    def _capped(self, key: str, most: int) -> list[Workload]:
        """The rows with no value of `key` above `most`."""
        counted = "bench.num_prompts" in self.settings.entries or self.workloads[0].file is not None

        def cap(name: str, value: int) -> int:
            return min(value, most) if name == key else value

        def cap_length(name: str, length: Length) -> Length:
            return Length(cap(name, length.low), cap(name, length.high))

        return [
            replace(
                one,
                batch=cap("batch", one.batch),
                depth=cap("depth", one.depth),
                prompt=cap_length("prompt_len", one.prompt),
                gen=cap_length("gen_len", one.gen),
                groups=cap("groups", one.groups),
                num_prompts=cap(
                    "num_prompts", one.num_prompts if counted else cap("batch", one.batch)
                ),
            )
            for one in self.workloads
        ]


def option_text(settings: Settings, key: str, text: str) -> str:
    """Write a key of section `bench` as it is typed: in one way only, so in the way in which it was."""
    return option(settings, f"bench.{key}", text, flag=f"--{key.replace('_', '-')}")


def _value(workload: Workload, key: str) -> int:
    lengths = {"prompt_len": workload.prompt.high, "gen_len": workload.gen.high}
    return lengths[key] if key in lengths else int(getattr(workload, key))


def _text(workload: Workload, key: str) -> str:
    lengths = {"prompt_len": workload.prompt, "gen_len": workload.gen}
    return str(lengths[key] if key in lengths else getattr(workload, key))
