"""Whether a run may go on with a journal: only if nothing that was answered would get lost."""

from minivllm_cli.batch.scan import Scan
from minivllm_cli.console.streams import Console
from minivllm_cli.errors import CliError
from minivllm_cli.files.journal import Journal


def refuse_to_lose(journal: Journal, scan: Scan, console: Console, *, force: bool) -> None:
    """Publishing removes the journal: every answer in it has to be one that this run publishes.

    Args:
        force: lines that changed since they were answered may be answered again.

    Raises:
        CliError: answers would be lost; how many, and why.
    """
    outside = journal.num_usable - scan.num_done - scan.num_changed
    changed = 0 if force else scan.num_changed
    if not outside and not changed:
        if scan.num_changed:
            console.warn(f"{scan.num_changed} answered lines changed and are run again")
        return
    parts = [
        f"{outside} are of lines that this run leaves out" if outside else "",
        f"{changed} are of lines that changed, or whose sampling did" if changed else "",
    ]
    again = "" if outside else "--resume force to run the changed lines again, "
    raise CliError(
        f"{journal.path} holds {journal.num_usable} finished answers; this run would lose "
        f"{outside + changed} of them",
        why="; ".join(part for part in parts if part),
        hint=f"the same command as before, {again}or --overwrite to start again",
    )
