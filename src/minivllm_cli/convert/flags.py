"""The options of `convert-weights`, and which of them go together."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from minivllm_cli.config.flags import OptionGroup, flag, switch
from minivllm_cli.errors import CliError


class TargetDtype(StrEnum):
    """The number type of matrices in the target."""

    KEEP = "keep"
    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


class QkvzLayout(StrEnum):
    """How rows lie in a fused q, k, v and z projection."""

    INTERLEAVED = "interleaved"
    CONCAT = "concat"


class GateLayout(StrEnum):
    """How rows of queries and their gates lie in q_proj."""

    PER_HEAD = "per-head"
    HALVES = "halves"


class Verify(StrEnum):
    """How much of what was written is read back and compared."""

    NONE = "none"
    SAMPLE = "sample"
    FULL = "full"


_INSTEAD, _SOURCE, _MAPPING, _TARGET = "Instead of converting", "Source", "Mapping", "Target"


@dataclass(frozen=True)
class ConvertFlags(OptionGroup):
    """What only `convert-weights` takes. Layout flags and sizes are None unless typed."""

    dry_run: bool = switch("Show what would be done, from headers alone", panel=_INSTEAD)
    explain: str | None = flag(
        "Show the rules that one tensor, of SRC or of the target, goes through", metavar="NAME"
    )
    check: bool = switch(
        "Read a finished DST again and compare it with SRC; exit code 5 if it differs"
    )
    model_config: Path | None = flag(
        "The config.json of weights that have none beside them", metavar="FILE", panel=_SOURCE
    )
    state_key: str | None = flag(
        "The entry of a .pt file that holds the weights; dots between levels", metavar="KEY"
    )
    ema: bool = switch("Take the averaged weights of a .pt file")
    qkvz_layout: QkvzLayout | None = flag("Rows of a fused in_proj_qkvz", panel=_MAPPING)
    q_gate_layout: GateLayout | None = flag("Rows of q_proj; per-head if not given")
    mapping: Path | None = flag(
        "YAML lines of SOURCE: TARGET, or null to drop, before the rules. Names as the "
        "table prints them; * is a segment, ** several, {0-2} numbers; filled in on the right",
        metavar="FILE",
    )
    allow_unmatched: list[str] | None = flag(
        "Leave out source tensors that no rule knows; repeatable", metavar="GLOB"
    )
    allow_missing: list[str] | None = flag(
        "Do without these target tensors; repeatable. What is incomplete is not loaded",
        metavar="GLOB",
    )
    dtype: TargetDtype | None = flag(
        "Of matrices; keep if not given. A_log etc. stay fp32", panel=_TARGET
    )
    max_shard_size: str | None = flag("Most bytes of a file; 5GB if not given", metavar="SIZE")
    verify: Verify | None = flag("Read back and compare; sample if not given")
    verify_logits: Path | None = flag(
        "Compare with logits that another program stored as safetensors", metavar="FILE"
    )
    resume: bool = switch("Go on with what an earlier run left")
    overwrite: bool = switch("Replace what is at DST; asks first")
    yes: bool = switch("Answer yes to that question", short="-y")
    json_: bool = switch("One JSON document on stdout")


def check_combination(flags: ConvertFlags, dst: Path | None) -> None:
    """Refuse flags that contradict each other, or that what was asked for would ignore.

    Raises:
        CliError: the first such pair.
    """
    modes = [
        name
        for name, wanted in (
            ("--dry-run", flags.dry_run),
            ("--explain", flags.explain is not None),
            ("--check", flags.check),
        )
        if wanted
    ]
    if len(modes) > 1:
        raise CliError(
            f"{modes[0]} and {modes[1]} exclude each other",
            why="each is there instead of converting",
            hint="one of them",
        )
    if flags.resume and flags.overwrite:
        raise CliError(
            "--resume and --overwrite exclude each other",
            why="one keeps what an earlier run has finished, the other throws it away",
            hint="one of them",
        )
    if flags.yes and not flags.overwrite:
        raise CliError(
            "-y answers the question of --overwrite",
            why="nothing else is asked, and --overwrite is not given",
            hint="--overwrite -y",
        )
    if flags.ema and flags.state_key is not None:
        raise CliError(
            "--ema and --state-key exclude each other",
            why="both say which entry of the file holds the weights",
            hint="--state-key alone names the entry",
        )
    _check_mode(flags, modes[0] if modes else None)
    if dst is None and modes not in (["--dry-run"], ["--explain"]):
        raise CliError(
            "DST is missing",
            why="--check compares DST with SRC" if flags.check else "a target needs a place",
            hint="minivllm convert-weights SRC DST",
        )


def _check_mode(flags: ConvertFlags, mode: str | None) -> None:
    verify = {
        "--verify": flags.verify is not None,
        "--verify-logits": flags.verify_logits is not None,
    }
    placing = {"--resume": flags.resume, "--overwrite": flags.overwrite}
    planning = {
        "--qkvz-layout": flags.qkvz_layout is not None,
        "--q-gate-layout": flags.q_gate_layout is not None,
        "--mapping": flags.mapping is not None,
        "--allow-unmatched": bool(flags.allow_unmatched),
        "--allow-missing": bool(flags.allow_missing),
        "--dtype": flags.dtype is not None,
        "--max-shard-size": flags.max_shard_size is not None,
    }
    if mode == "--check":
        given = [name for name, typed in (verify | placing | planning).items() if typed]
        if given:
            raise CliError(
                f"{given[0]} does not go with --check",
                why="the choices of a conversion are in DST's manifest",
                hint=f"Leave {given[0]} out.",
            )
    elif mode is not None:
        # A dry run says whether DST could be written to.
        useless = verify if mode == "--dry-run" else verify | placing
        given = [name for name, typed in useless.items() if typed]
        if given:
            raise CliError(
                f"{given[0]} does not go with {mode}",
                why=f"{mode} writes nothing",
                hint="Leave one of them out.",
            )
