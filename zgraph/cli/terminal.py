"""Output of subcommands: tables, JSON, and errors in one line."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Generator, Iterable
from typing import Any

import click

from zgraph.reporting.tables import Table

PIPE_WIDTH = 200  # columns without a terminal, so that rows are not wrapped in a file

json_option: Callable[[Any], Any] = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON on standard output, and nothing else."
)


class UserError(click.ClickException):
    """An error of the user, such as a wrong argument: printed in one line, with exit status 2."""

    exit_code = 2


def print_tables(tables: Iterable[Table], **styles: str) -> None:
    """Print tables that have rows; texts are printed verbatim, without rich's markup.

    Args:
        tables: tables to print.
        styles: rich style by text: cells with this text are printed in this style.
    """
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    terminal = sys.stdout.isatty()
    console = Console(file=sys.stdout, width=None if terminal else PIPE_WIDTH, highlight=False)
    for table in tables:
        if not table.rows:
            continue
        shown = RichTable(
            title=Text(table.title), title_justify="left", title_style="bold", show_header=bool(table.columns)
        )
        for name in table.columns or table.rows[0]:
            shown.add_column(Text(name if table.columns else ""), overflow="fold")
        for row in table.rows:
            shown.add_row(*(Text(cell, style=styles.get(cell, "")) for cell in row))
        console.print(shown)


def print_json(document: object) -> None:
    click.echo(json.dumps(document, indent=2))


@contextlib.contextmanager
def working(what: str) -> Generator[None]:
    """Show the status text `what` during a `with` block, and redirect the block's output to standard error."""
    from rich.console import Console

    with contextlib.redirect_stdout(sys.stderr), Console(file=sys.stderr).status(what):
        yield
