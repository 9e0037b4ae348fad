"""`zgraph report`: creates a report's page and other files from `report.json`, and opens the page."""

from __future__ import annotations

import webbrowser
from pathlib import Path

import click

from zgraph.cli.terminal import UserError, json_option, print_json, print_tables, working
from zgraph.errors import ZgraphError
from zgraph.reporting.tables import Table, size


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--open", "opens", is_flag=True, help="Open the page in the browser.")
@json_option
def report(directory: Path, opens: bool, as_json: bool) -> None:
    """Create index.html and the other files of a report from its report.json, and print their paths.

    DIRECTORY is the output folder of options={"dump": ...} or zgraph.report(model, ...), or the folder of one frame in
    it. The page shows all frames and ranks in DIRECTORY.
    """
    with working("writing the report"):
        page, *others = rebuild(directory)
    if as_json:
        print_json({"page": str(page), "files": [str(file) for file in others]})
    else:
        rows = tuple((str(file), size(file.stat().st_size)) for file in (page, *others))
        print_tables([Table("written", ("file", "size"), rows)])
    if opens and not webbrowser.open(page.resolve().as_uri()):
        raise UserError(f"there is no browser to open {page}; open it on another machine.")


def rebuild(directory: Path) -> list[Path]:
    """Write one page for all reports in a directory, and rewrite the files that are made from each report.json.

    Args:
        directory: directory with reports; or one report.json, whose page is written to the same folder.

    Returns:
        The page, then all other files.

    Raises:
        UserError: a report is missing or cannot be read, or the folder cannot be written.
    """
    from zgraph.reporting.export.folder import files_of
    from zgraph.reporting.export.reading import load
    from zgraph.reporting.export.report_json import REPORT
    from zgraph.reporting.page.write_page import write_page

    try:
        # Loads all reports before it writes anything, so that a bad one leaves the folder unchanged.
        written = [write_page(load(directory), directory if directory.is_dir() else directory.parent)]
        for source in sorted(directory.rglob(REPORT)) if directory.is_dir() else [directory]:
            for name, text in files_of(load(source)):
                file = source.with_name(name)
                file.write_text(text, encoding="utf-8", errors="backslashreplace")
                written.append(file)
    except (ZgraphError, OSError) as error:
        raise UserError(str(error)) from error
    return written
