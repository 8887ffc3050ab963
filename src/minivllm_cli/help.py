"""`--help` as plain text, options under headings. Rich is not needed for it, nor loaded."""

from typing import Any

from typer.core import TyperCommand

COMMON = "Common options"


class GroupedCommand(TyperCommand):
    """A command whose options stand under the headings that they were declared with."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, then one list of options a heading, in the order of declaration."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is None:
                continue
            panel = getattr(param, "rich_help_panel", None)
            if panel is None and param.param_type_name == "argument":
                panel = "Arguments"
            elif panel is None:
                # Typer's own --help comes last, after the shared options.
                panel = COMMON if param.name == "help" else "Options"
            panels.setdefault(panel, []).append(record)
        for panel, rows in panels.items():
            with formatter.section(panel):
                formatter.write_dl(rows)
