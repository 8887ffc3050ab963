"""The `try:` line of `convert-weights`, read as a person at a shell would: the options it names."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

_LINE = re.compile(r"--mapping FILE with the line (.+?)(?:; (?:or|and) (?=[a-z-])|$)")
_UNDER_JSON = "--mapping FILE with what --dry-run --json prints under remedy.mapping"
# Options whose value is in the line itself.
_FLAG = re.compile(
    r"(--(?:allow-unmatched|allow-missing|qkvz-layout|q-gate-layout|dtype|state-key)) "
    r"((?:'(?:[^']|'\"'\"')*'|[^\s',;])+)|(--resume|--overwrite(?: -y)?)(?=[\s,.;]|$)"
)


def options_of(
    hint: str, args: list[str], file: Path, as_json: Callable[[], dict]
) -> list[str] | None:
    """`args` changed as `hint` says, taking the first of several ways; None where it names no option.

    Args:
        file: where a mapping is written, in the place of one that `args` have.
        as_json: gives the document of `--dry-run --json` under `args`.
    """
    changed = list(args)
    line = _LINE.search(hint)
    mapping = None if line is None else line[1]
    if _UNDER_JSON in hint:
        mapping = json.dumps(as_json()["remedy"]["mapping"])
    rest = hint if line is None else hint[: line.start()] + hint[line.end() :]
    if mapping is not None or "leave --mapping out" in hint:
        while "--mapping" in changed:
            at = changed.index("--mapping")
            del changed[at : at + 2]
    if mapping is not None:
        file.write_text(mapping + "\n", encoding="utf-8")
        changed += ["--mapping", str(file)]
        # What follows "or" is another way than the mapping.
        rest = "" if line is not None and "; or " in line[0] else rest
    seen: list[tuple[str, str, str]] = []
    for flag, value, bare in _FLAG.findall(rest):
        if bare:
            changed = [arg for arg in changed if arg not in ("--resume", "--overwrite", "-y")]
            changed += shlex.split(bare)
            break  # one of several
        (word,) = shlex.split(value)
        if flag in ("--dtype", "--state-key", "--qkvz-layout"):
            if flag in [one for one, _, _ in seen]:
                continue  # another choice
            if flag in changed:
                at = changed.index(flag)
                del changed[at : at + 2]
        seen.append((flag, value, bare))
        changed += [flag, word]
    return None if changed == args else changed
