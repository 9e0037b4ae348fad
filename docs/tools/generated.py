"""Files that are made from others: written anew, or compared with what would be written."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path


def keep_up(texts: Mapping[Path, str]) -> int:
    """Write each file; with `--check` on the command line only say which are stale, and return 1 where any is."""
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path} is not what {sys.argv[0]} makes of the code and the figures; run make docs.")
        return 1 if stale else 0
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(texts[path])
        print(f"wrote {path}")
    return 0
