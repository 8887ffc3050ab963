"""Text that comes from a file, such as the name of a tensor, as it may stand in a message or a table."""

from collections.abc import Iterable

# Longer than any name that a producer writes, short enough for a line.
_LIMIT = 200


def escape(text: object, limit: int = _LIMIT) -> str:
    """Write `text` on one line: what is no visible character is escaped, the middle of a long text left out.

    Control characters, line breaks, marks that turn the direction of writing and lone surrogates become
    `\\x1b`, `\\n`, `\\u202e`; a text without them comes back as it is.
    """
    whole = str(text)
    # Not more is escaped than is shown: a name may have a million characters.
    shown = whole if len(whole) <= limit else whole[:limit] + whole[-limit:]
    if not shown.isprintable():
        shown = "".join(map(_escaped, shown))
    if len(whole) <= limit and len(shown) <= limit:
        return shown
    start, end = limit * 2 // 3, limit // 4
    return f"{shown[:start]}...{shown[-end:]} ({len(whole):,} characters)"


def listed(texts: Iterable[object], most: int = 4) -> str:
    """Return up to `most` of `texts`, each escaped, and how many more there are."""
    shown = [escape(text) for text in texts]
    more = f" and {len(shown) - most:,} more" if len(shown) > most else ""
    return ", ".join(shown[:most]) + more


def _escaped(character: str) -> str:
    if character.isprintable():
        return character
    return character.encode("unicode_escape").decode("ascii")
