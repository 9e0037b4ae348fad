"""Inserts a report's data into the HTML page, a single file that loads nothing from the network."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PAGE = "index.html"
_BUILT = "page.html"
_PLACE = "{{report}}"


def page_text(document: Mapping[str, Any]) -> str:
    """Return the text of a report's page (HTML); equal documents give the same bytes.

    Args:
        document: result of `zgraph.reporting.export.reading.load`, with any number of frames and ranks.
    """
    data = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
    # "<" begins markup anywhere in a script element; in JSON it only occurs inside strings.
    before, _, after = (Path(__file__).parent / _BUILT).read_text(encoding="utf-8").partition(_PLACE)
    return before + data.replace("<", "\\u003c") + after


def write_page(document: Mapping[str, Any], path: Path) -> Path:
    """Write the page of a report to a file, or as index.html into a folder.

    Args:
        document: see `page_text`.
        path: path of the file or folder.

    Returns:
        The file.
    """
    file = path / PAGE if path.is_dir() else path
    file.write_text(page_text(document), encoding="utf-8")
    return file
