"""What the system refuses, wherever it comes up, as an error that names the file and a remedy."""

from collections.abc import Iterator
from contextlib import contextmanager

from minivllm_engine.core.errors import CheckpointError, ConversionError


@contextmanager
def reading_errors() -> Iterator[None]:
    """For what reads; also a decorator.

    Raises:
        CheckpointError: in the place of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{_file_of(error)} cannot be read",
            why=error.strerror or str(error),
            hint="See that it is there and that you may read it.",
        ) from None


@contextmanager
def destination_errors() -> Iterator[None]:
    """For what looks at a destination or changes it; also a decorator.

    Raises:
        ConversionError: "destination", in the place of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise ConversionError(
            f"{_file_of(error)} cannot be looked at or replaced",
            why=error.strerror or str(error),
            hint="Give a directory in a place where you may read and write.",
            code="destination",
        ) from None


def _file_of(error: OSError) -> str:
    return "a file" if error.filename is None else str(error.filename)
