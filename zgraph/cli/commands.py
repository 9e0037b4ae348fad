"""The command `zgraph`, which combines the subcommands and prints errors in one line.

Uses click, not typer: it starts in half the time and needs no further package. torch is imported only when a subcommand
runs, so that `zgraph --help` answers immediately.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from zgraph.cli.calibrate import calibrate
from zgraph.cli.diff import diff
from zgraph.cli.doctor import doctor
from zgraph.cli.plan import plan
from zgraph.cli.report import report
from zgraph.cli.sites import sites
from zgraph.errors import ZgraphError

INTERRUPTED = 130  # exit status of shells for Ctrl-C


class _Commands(click.Group):
    """Group of commands that prints each error as one line on standard error, without usage and traceback."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        status = 0
        try:
            # A command returns or exits with an integer status, or returns None.
            status = super().main(args, prog_name, complete_var, standalone_mode=False, **extra) or 0
            sys.stdout.flush()
        except click.ClickException as error:
            status = _refused(error.format_message(), error.exit_code)
        except click.Abort:
            status = INTERRUPTED
        except ZgraphError as error:
            status = _refused(str(error), 1)
        except BrokenPipeError:  # the reader has closed the pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            status = 1
        sys.exit(status)


def _refused(message: str, status: int) -> int:
    text = " ".join(message.split())
    click.echo(text if text.startswith("zgraph") else f"zgraph: {text}", err=True)
    return status


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=True)
@click.pass_context
def commands(ctx: click.Context) -> None:
    """Sharded training as compiler passes: check machines, plan training steps, report on compiled models.

    Exit status: 0 success, 1 failure or a failed check, 2 invalid command line.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


commands.add_command(doctor)
commands.add_command(calibrate)
commands.add_command(plan)
commands.add_command(report)
commands.add_command(diff)
commands.add_command(sites)
