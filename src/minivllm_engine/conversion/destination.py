"""The directory that a conversion makes: built beside it, put in its place when it is complete.

Three names: `dst`, `dst`.partial while it is built, and `dst`.replaced for the moment in which an
overwritten one makes way. Nothing is deleted here that is not a file of a checkpoint.
"""

import fcntl
import fnmatch
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from minivllm_engine.checkpoint.locate import expanded
from minivllm_engine.checkpoint.mismatch import MANIFEST
from minivllm_engine.conversion.plan import partial_path
from minivllm_engine.conversion.report import destination_errors
from minivllm_engine.conversion.source import Source
from minivllm_engine.conversion.source_files import SIDE_FILES, TEMPLATES, is_licence
from minivllm_engine.core.atomic_file import sync_directory
from minivllm_engine.core.errors import ConversionError
from minivllm_engine.core.escape import listed
from minivllm_engine.core.units import count_text

STATE = ".conversion.json"
INDEX = "model.safetensors.index.json"

_OF_A_CHECKPOINT = (
    "config.json",
    MANIFEST,
    STATE,
    INDEX,
    "*.safetensors",
    "*.tmp",
    "README.md",
    ".gitattributes",
    *SIDE_FILES,
)


@dataclass(frozen=True, slots=True)
class Destination:
    """Paths of one conversion, with links resolved."""

    path: Path
    partial: Path
    replaced: Path

    @classmethod
    def of(cls, dst: str | Path) -> "Destination":
        path = Path(os.path.realpath(expanded(dst)))
        return cls(path, partial_path(path), path.with_name(path.name + ".replaced"))

    @destination_errors()
    def check(self, source: Source, *, resume: bool, overwrite: bool) -> None:
        """Refuse a destination that a conversion must not touch.

        Raises:
            ConversionError: "destination": something is there, or it is where the source is.
        """
        _keep_apart(self, source)
        _check_places(self)
        _check_writable(self.partial)
        if self.path.exists() and not self.path.is_dir():
            raise _wrong(
                f"{self.path} is a file",
                why="a target is a directory, and no file is replaced by one",
                hint="Give the path of a new directory.",
            )
        if overwrite:
            for directory in (self.path, self.partial, self.replaced):
                _check_removable(directory)
            return
        if resume:
            _check_removable(self.partial)
        if is_filled(self.path) and not resume:
            _check_removable(self.path)
            again = (self.path / MANIFEST).is_file()
            raise _wrong(
                f"{self.path} is not empty",
                why=_held(self.path),
                hint="--resume, or --overwrite" if again else "--overwrite",
            )
        if is_filled(self.partial) and not resume:
            _check_removable(self.partial)
            raise _wrong(
                f"{self.partial} is left from a conversion that was not finished",
                why=_held(self.partial),
                hint="--resume to go on with it, or --overwrite to start again",
            )

    @contextmanager
    def building(self) -> Iterator[Path]:
        """Make the partial directory if need be, and hold it against other conversions.

        Raises:
            ConversionError: "destination": another process is writing there.
        """
        try:
            self.partial.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.partial, os.O_RDONLY)
        except OSError as error:
            raise _wrong(
                f"{self.partial} cannot be made",
                why=error.strerror or str(error),
                hint="Give a directory in a place where you may write.",
            ) from None
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _wrong(
                    f"another conversion is writing to {self.partial}",
                    why="it holds the lock on that directory",
                    hint="Wait until it is finished, or give another directory.",
                ) from None
            except OSError as error:
                raise _wrong(
                    f"{self.partial} cannot be locked",
                    why=error.strerror or str(error),
                    hint="Give a directory on a local disk.",
                ) from None
            for left_over in self.partial.rglob("*.tmp"):
                left_over.unlink()
            yield self.partial
        finally:
            os.close(descriptor)
            if self.partial.is_dir() and not is_filled(self.partial):
                self.partial.rmdir()

    def publish(self, *, overwrite: bool) -> None:
        """Put the partial directory in its place; what was there goes.

        Raises:
            ConversionError: "destination": something has come there since `check`, and is not to go.
        """
        if is_filled(self.path):
            if not overwrite:
                raise _wrong(
                    f"{self.path} is not empty any more",
                    why=f"another program filled it meanwhile; {_held(self.path)}",
                    hint=f"Move it away and run again with --resume: {self.partial} is complete.",
                )
            remove_checkpoint(self.replaced)
            os.rename(self.path, self.replaced)
        elif self.path.exists():
            self.path.rmdir()
        os.rename(self.partial, self.path)
        sync_directory(self.path.parent)
        self.clean_up()

    def clean_up(self) -> None:
        """Remove what served the way to a published target."""
        (self.path / STATE).unlink(missing_ok=True)
        remove_checkpoint(self.replaced)


def is_filled(directory: Path) -> bool:
    return directory.is_dir() and any(directory.iterdir())


def remove_checkpoint(directory: Path) -> None:
    """Delete a directory that holds nothing but files of a checkpoint; none there is fine.

    Raises:
        ConversionError: "destination": it holds something else.
    """
    if not directory.exists():
        return
    _check_removable(directory)
    for entry in directory.iterdir():
        if entry.name == TEMPLATES and not entry.is_symlink():
            remove_templates(entry)
        else:
            entry.unlink()
    directory.rmdir()


def remove_templates(folder: Path) -> None:
    """Delete the folder of chat templates of a checkpoint."""
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()


def _check_removable(directory: Path) -> None:
    if not directory.exists():
        return
    strange = sorted(entry.name for entry in directory.iterdir() if not _is_of_a_checkpoint(entry))
    if strange:
        raise _wrong(
            f"{directory} is not overwritten: it holds what is no file of a checkpoint",
            why=listed(strange),
            hint="Give another directory, or empty this one yourself.",
        )


def _is_of_a_checkpoint(entry: Path) -> bool:
    name = entry.name
    if entry.is_dir() and not entry.is_symlink():
        files = list(entry.iterdir()) if name == TEMPLATES else [entry]
        return all(file.suffix in (".jinja", ".tmp") and not file.is_dir() for file in files)
    return is_licence(name) or any(fnmatch.fnmatchcase(name, known) for known in _OF_A_CHECKPOINT)


def _check_places(destination: Destination) -> None:
    """Can all three names be had there?"""
    for place in (destination.path, destination.partial, destination.replaced):
        try:
            is_link = stat.S_ISLNK(place.lstat().st_mode)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise _wrong(
                f"{place} cannot be made",
                why=error.strerror or str(error),
                hint="Give a directory in a place where you may write, with a shorter name.",
            ) from None
        if place == destination.path and is_link:
            # Links were followed: what is left is one in a circle.
            raise _wrong(
                f"{place} is a link in a circle",
                why=f"it leads to {os.readlink(place)}",
                hint="Give another directory.",
            )
        if place != destination.path and not place.is_dir():
            raise _wrong(
                f"{place} is a file, and a directory of that name is needed",
                why=f"{destination.path.name} is built there, or makes way to it",
                hint="Give another directory, or move that file.",
            )


def _check_writable(path: Path) -> None:
    """May something be made at `path`?"""
    parent = path.parent
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    if not os.access(parent, os.W_OK | os.X_OK):
        raise _wrong(
            f"{path} cannot be made",
            why=f"nothing may be written to {parent}",
            hint="Give a directory in a place where you may write.",
        )


def _keep_apart(destination: Destination, source: Source) -> None:
    src = Path(os.path.realpath(source.path))
    files = [Path(os.path.realpath(file)) for file in source.files]
    for path in (destination.path, destination.partial, destination.replaced):
        if path == src:
            raise _wrong(
                f"{path} is the source",
                why="a source is never written to",
                hint="Give another directory.",
            )
        if source.path.is_dir() and src in path.parents:
            raise _wrong(
                f"{path} lies inside the source {src}",
                why="a source is never written to",
                hint="Give another directory.",
            )
        if path in src.parents or any(path in file.parents for file in files):
            raise _wrong(
                f"the source {src} lies inside {path}",
                why="it would be deleted with what is replaced there",
                hint="Give another directory.",
            )


def _held(directory: Path) -> str:
    names = sorted(entry.name for entry in directory.iterdir())
    made = "" if MANIFEST in names or STATE in names else "; nothing tells what they were made from"
    return f"it holds {count_text(len(names), 'file')}: {listed(names)}{made}"


def _wrong(what: str, *, why: str | None, hint: str) -> ConversionError:
    return ConversionError(what, why=why, hint=hint, code="destination")
