"""Where records go: stdout, something that cannot be renamed, or a file with its journal."""

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from minivllm_cli.errors import CliError
from minivllm_cli.files.input_file import InputFile
from minivllm_cli.files.journal import holds_records

_STDOUT_NAMES = ("-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")
_ANOTHER_OUTPUT = "--output new.jsonl"


@dataclass(frozen=True, slots=True)
class OutputTarget:
    """A checked `--output`.

    Attributes:
        path: None for stdout, else the real path behind links.
        is_file: written through a journal and renamed; otherwise written as it comes.
        mode: permissions of the file that is replaced, if there is one.
    """

    path: Path | None
    is_file: bool = False
    mode: int | None = None

    @property
    def journal_path(self) -> Path:
        """OUT.partial."""
        assert self.path is not None
        return self.path.with_name(self.path.name + ".partial")

    @property
    def publishing_path(self) -> Path:
        """What is moved over the output once it is whole."""
        assert self.path is not None
        return self.path.with_name(self.path.name + ".publishing")


def check_output(
    output: str, source: InputFile | None, *, resume: str | None, overwrite: bool
) -> OutputTarget:
    """Find out what `--output` is and whether it may be written. Nothing is created.

    Raises:
        CliError: it is the input, exists, cannot be written, or cannot do what was asked for.
    """
    if resume is not None and overwrite:
        raise CliError("--resume and --overwrite exclude each other", hint="one of them")
    if output in _STDOUT_NAMES:
        _refuse_file_flags("stdout", resume, overwrite)
        return OutputTarget(None)
    path = Path(os.path.realpath(output))
    try:
        found = os.stat(output)
    except FileNotFoundError:
        found = None
    except OSError as error:
        raise _cannot(output, error.strerror or str(error)) from None
    if found is not None and stat.S_ISDIR(found.st_mode):
        raise _cannot(output, "it is a directory", hint=f"--output {Path(output) / 'out.jsonl'}")
    if found is not None and not stat.S_ISREG(found.st_mode):
        _refuse_file_flags(output, resume, overwrite)
        return OutputTarget(Path(output))
    target = OutputTarget(path, True, stat.S_IMODE(found.st_mode) if found is not None else None)
    _check_file(output, target, source, found, overwrite)
    return target


def _check_file(
    output: str,
    target: OutputTarget,
    source: InputFile | None,
    found: os.stat_result | None,
    overwrite: bool,
) -> None:
    assert target.path is not None
    if source is not None and (found is not None and source.same_file(target.path)):
        raise CliError("--output and --input are the same file", hint=_ANOTHER_OUTPUT)
    if source is not None and source.same_file(target.journal_path):
        raise CliError(f"--input is the journal of --output {output}", hint=_ANOTHER_OUTPUT)
    if not target.path.parent.is_dir():
        raise _cannot(
            output,
            f"directory {target.path.parent} does not exist",
            hint=f"mkdir -p {target.path.parent}",
        )
    beside = target.publishing_path
    if os.path.lexists(beside) and not (
        stat.S_ISREG(os.lstat(beside).st_mode) and target.journal_path.exists()
    ):
        # One that a killed run of ours left has the journal beside it.
        raise CliError(
            f"{beside} is in the way of the output", hint="move it away, or --output new.jsonl"
        )
    if found is None:
        return
    if not found.st_mode & 0o222:
        raise _cannot(output, "it is read-only", hint=_ANOTHER_OUTPUT)
    # What a run left that was stopped before it answered anything is no leave to replace the output.
    if not overwrite and not holds_records(target.journal_path):
        raise CliError(
            f"{output} exists", hint=f"--overwrite, or --only-failed {output} --output new.jsonl"
        )


def _refuse_file_flags(name: str, resume: str | None, overwrite: bool) -> None:
    if resume is not None or overwrite:
        flag = "--overwrite" if overwrite else "--resume"
        raise CliError(f"{flag} needs a regular file; {name} is none", hint="--output FILE")


def check_side_file(
    flag: str,
    path: Path | None,
    example: str,
    others: Mapping[str, Path | None],
    *,
    source: InputFile | None = None,
    target: OutputTarget | None = None,
) -> None:
    """Find out whether a file beside the output may be written. Nothing is created.

    Args:
        flag: that names it, as in "--summary".
        example: a name that would do.
        others: flag -> path of the other files of this run.

    Raises:
        CliError: it is another file of this run, or cannot be written.
    """
    if path is None:
        return
    hint = f"{flag} {example}"
    if str(path) in _STDOUT_NAMES:
        raise CliError(f"{flag} {path}: stdout holds results only", hint=hint)
    if source is not None and source.same_file(path):
        raise CliError(f"{flag} and --input are the same file", hint=hint)
    for name, other in others.items():
        if other is not None and _same_path(path, other):
            raise CliError(f"{flag} and {name} are the same file", hint=hint)
    if target is not None and target.path is not None:
        if _same_path(path, target.path):
            raise CliError(f"{flag} and --output are the same file", hint=hint)
        if target.is_file and _same_path(path, target.journal_path):
            raise CliError(f"{flag} is the journal of --output", hint=hint)
    if path.is_dir():
        raise _cannot(path, "it is a directory", hint=f"{flag} {path / example}")
    real = Path(os.path.realpath(path))
    if not path.exists() and not real.parent.is_dir():
        raise _cannot(path, "its directory does not exist", hint=f"mkdir -p {real.parent}")
    # A file is replaced, which takes the directory; anything else is written to.
    written = path if path.exists() and not path.is_file() else real.parent
    if not os.access(written, os.W_OK):
        raise _cannot(path, "permission denied", hint=hint)


def _same_path(one: Path, other: Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def _cannot(path: str | Path, why: str, hint: str = _ANOTHER_OUTPUT) -> CliError:
    return CliError(f"cannot write {path}: {why}", hint=hint)
