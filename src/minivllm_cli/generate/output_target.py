"""Where records go: stdout, something that cannot be renamed, or a file with its journal."""

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from minivllm_cli.generate.input_file import InputFile
from minivllm_cli.problems import CliError

_STDOUT_NAMES = ("-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")


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


def check_output(
    output: str, source: InputFile | None, *, resume: str | None, overwrite: bool
) -> OutputTarget:
    """Find out what `--output` is and whether it may be written. Nothing is created.

    Raises:
        CliError: it is the input, exists, cannot be written, or cannot do what was asked for.
    """
    if resume is not None and overwrite:
        raise CliError("--resume and --overwrite exclude each other")
    if output in _STDOUT_NAMES:
        _refuse_file_flags("stdout", resume, overwrite)
        return OutputTarget(None)
    path = Path(os.path.realpath(output))
    try:
        found = os.stat(path)
    except FileNotFoundError:
        found = None
    except OSError as error:
        raise CliError(f"cannot write {output}: {error.strerror or error}") from None
    if found is not None and stat.S_ISDIR(found.st_mode):
        raise CliError(f"cannot write {output}: it is a directory")
    if found is not None and not stat.S_ISREG(found.st_mode):
        _refuse_file_flags(output, resume, overwrite)
        return OutputTarget(path)
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
        raise CliError("--output and --input are the same file")
    if source is not None and source.same_file(target.journal_path):
        raise CliError(f"--input is the journal of --output {output}")
    if not target.path.parent.is_dir():
        raise CliError(f"cannot write {output}: directory {target.path.parent} does not exist")
    if found is None:
        return
    if not found.st_mode & 0o222:
        raise CliError(f"cannot write {output}: it is read-only")
    if not overwrite and not target.journal_path.exists():
        raise CliError(
            f"{output} exists", hint=f"--overwrite, or --only-failed {output} --output new.jsonl"
        )


def _refuse_file_flags(name: str, resume: str | None, overwrite: bool) -> None:
    if resume is not None or overwrite:
        flag = "--overwrite" if overwrite else "--resume"
        raise CliError(f"{flag} needs a regular file; {name} is none")
