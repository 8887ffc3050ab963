"""The positional words of `inspect-cache`: which is a view, which names the model, which is a dump."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from minivllm_cli.errors import CliError

VIEWS = ("plan", "run")
_USAGE = "minivllm inspect-cache [MODEL] [plan|run], or FILE"


@dataclass(frozen=True, slots=True)
class Positionals:
    """What the words ask for: a view of a model, or a dump. `model` is None where none is named."""

    view: str
    model: str | None
    dump: Path | None = None


def read_positionals(words: Sequence[str]) -> Positionals:
    """Tell the words apart: at most one view and one MODEL, in any order, or the file of a dump alone.

    A directory that is called as a view is written `./plan`; a regular file is a dump.

    Raises:
        CliError: two of a kind, a dump beside something else, or no such file.
    """
    views = [word for word in words if word in VIEWS]
    others = [word for word in words if word not in VIEWS]
    dumps = [word for word in others if Path(word).is_file()]
    models = [word for word in others if word not in dumps]
    for what, found in (("views", views), ("models", models), ("dumps", dumps)):
        if len(found) > 1:
            raise CliError(
                f"two {what}: {found[0]} and {found[1]}",
                why=f"the views are: {', '.join(VIEWS)}; a file is a dump; any other word is MODEL",
                hint=_USAGE,
            )
    if dumps and (views or models):
        raise CliError(
            f"{dumps[0]} is a dump, which names its model, and {(views + models)[0]} is not for it",
            hint=f"minivllm inspect-cache {dumps[0]}",
        )
    if models and models[0].endswith(".json") and not Path(models[0]).exists():
        raise CliError(
            f"cannot read {models[0]}: no such file",
            hint="minivllm generate --input FILE --cache-dump DUMP writes a dump",
        )
    dump = Path(dumps[0]) if dumps else None
    return Positionals(views[0] if views else VIEWS[0], models[0] if models else None, dump)
