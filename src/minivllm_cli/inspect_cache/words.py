"""The positional words of `inspect-cache`: which of them is a view, and which names the model."""

from collections.abc import Sequence
from dataclasses import dataclass

from minivllm_cli.problems import CliError

VIEWS = ("plan",)


@dataclass(frozen=True, slots=True)
class Words:
    """What the words ask for. `model` is None where none of them names one."""

    view: str
    model: str | None


def read_words(words: Sequence[str]) -> Words:
    """Tell the words apart: at most one view and one MODEL, in any order.

    A directory that is called as a view is written `./plan`.

    Raises:
        CliError: two of a kind.
    """
    views = [word for word in words if word in VIEWS]
    models = [word for word in words if word not in VIEWS]
    for what, found in (("views", views), ("models", models)):
        if len(found) > 1:
            raise CliError(
                f"two {what}: {found[0]} and {found[1]}",
                why=f"the views are: {', '.join(VIEWS)}; any other word is MODEL",
                hint="minivllm inspect-cache [MODEL] [plan]",
            )
    return Words(views[0] if views else VIEWS[0], models[0] if models else None)
