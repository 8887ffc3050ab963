"""Every refusal that a test provokes says what, why and what to try, and says nothing twice."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from minivllm_cli.errors import CliError
from minivllm_engine.core.errors import CheckpointError, ConfigError, ConversionError, EngineError

_CHECKED = (CheckpointError, ConversionError, ConfigError)


def faults(what: str, why: str | None, hint: str | None) -> list[str]:
    """What is wrong with the three parts of a refusal."""
    found = []
    if not hint:
        found.append("no hint")
    if not why or why == "None":
        found.append("no why")
    elif not _words(why) - _words(what):
        found.append("why says what was said")
    elif hint and not _words(why) - _words(hint):
        found.append("why says what the hint says")
    return found


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))


@contextmanager
def whole_refusals(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails the test in which an error of a checkpoint, a conversion or its options lacks something."""
    wrong: list[str] = []
    make, make_cli = EngineError.__init__, CliError.__init__

    def checked(self: EngineError, *args: object, **kwargs: object) -> None:
        make(self, *args, **kwargs)  # type: ignore[arg-type]
        if isinstance(self, _CHECKED):
            wrong.extend(f"{fault}: {self}" for fault in faults(self.what, self.why, self.hint))

    def checked_cli(self: CliError, *args: object, **kwargs: object) -> None:
        make_cli(self, *args, **kwargs)  # type: ignore[arg-type]
        for problem in self.problems:
            wrong.extend(
                f"{fault}: {problem}" for fault in faults(problem.what, problem.why, problem.hint)
            )

    with monkeypatch.context() as patch:
        patch.setattr(EngineError, "__init__", checked)
        patch.setattr(CliError, "__init__", checked_cli)
        yield
    assert not wrong, "\n\n".join(wrong)
