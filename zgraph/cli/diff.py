"""`zgraph diff`: compares two compiles, or the graphs of one compile after two passes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from zgraph.cli.terminal import UserError, json_option, print_json, print_tables, working
from zgraph.errors import ZgraphError

if TYPE_CHECKING:
    from zgraph.cli.compare import Change
    from zgraph.reporting.export.report_json import Document


@click.command()
@click.argument("reports", nargs=-1, metavar="A [B]", type=click.Path(path_type=Path))
@click.option("--passes", nargs=2, metavar="FIRST SECOND", help='Two passes of A; "captured" is before any.')
@json_option
def diff(reports: tuple[Path, ...], passes: tuple[str, str] | None, as_json: bool) -> None:
    """Show how report B differs from report A: nodes, bytes, times, peaks, passes, parameters.

    A and B are folders written by options={"dump": ...} or zgraph.report(model, ...), or report.json files. With
    --passes, show how the graphs of A after one pass differ from its graphs after another, with a diff of their code.
    """
    if len(reports) != (1 if passes else 2):
        wanted = "one report with --passes FIRST SECOND" if passes else "two reports, or one with --passes FIRST SECOND"
        raise click.UsageError(f"write {wanted}.")
    with working("comparing"):
        changes, lines = _between_passes(reports[0], *passes) if passes else (_between_reports(*reports), [])
    if as_json:
        print_json({"changes": [change.as_json() for change in changes], **({"lines": lines} if passes else {})})
        return
    from zgraph.cli.compare import tables_of

    first, second = passes or _names(*reports)
    print_tables(tables_of(changes, first, second))
    for line in lines:
        click.echo(line)
    if not changes and not lines:
        click.echo("nothing differs")


def _between_reports(first: Path, second: Path) -> list[Change]:
    from zgraph.cli.compare import compare

    return compare(_loaded(first), _loaded(second))


def _between_passes(path: Path, first: str, second: str) -> tuple[list[Change], list[str]]:
    from zgraph.cli.compare import compare_passes, lines_between

    document = _loaded(path)
    try:
        return compare_passes(document, first, second), lines_between(document, first, second)
    except ValueError as error:
        raise UserError(str(error)) from error


def _loaded(path: Path) -> Document:
    from zgraph.reporting.export.reading import load

    try:
        return load(path)
    except ZgraphError as error:
        raise UserError(str(error)) from error


def _names(first: Path, second: Path) -> tuple[str, str]:
    """Return short names of two paths: the fewest last parts in which they differ; "A" and "B" if they are equal."""
    parts = first.resolve().parts, second.resolve().parts
    for count in range(1, max(map(len, parts)) + 1):
        ends = [str(Path(*each[-count:])) for each in parts]
        if ends[0] != ends[1]:
            return ends[0], ends[1]
    return "A", "B"
