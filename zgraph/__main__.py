"""Entry point of the command `zgraph`, also called as `python -m zgraph`."""

from __future__ import annotations

import importlib.util
import os
import sys

NEEDED = ("click", "rich")


def run() -> None:
    """Run the command `zgraph`."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"zgraph: the command line needs {' and '.join(missing)}; pip install 'zgraph[cli]'.", file=sys.stderr)
        sys.exit(2)
    from zgraph.cli.commands import commands

    _keep_output_apart()
    commands(prog_name="zgraph")


def _keep_output_apart() -> None:
    """Redirect the output of libraries to standard error, because gloo prints its connections to standard output."""
    try:
        results = os.dup(1)
        os.dup2(2, 1)
    except OSError:  # closed
        return
    sys.stdout = os.fdopen(results, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors, buffering=1)


if __name__ == "__main__":
    run()
