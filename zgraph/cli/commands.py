"""The command `zgraph`: its subcommands, and how user errors are shown.

Uses click, not typer: it starts in half the time, and needs no other package. Nothing here imports torch, so that
`zgraph --help` answers immediately; commands import it when they run.
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
from zgraph.errors import ZgraphError

INTERRUPTED = 130  # exit status of shells for Ctrl-C


class _Commands(click.Group):
    """A group whose errors are one line on standard error, without usage and traceback."""

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
    """Sharded training as compiler passes: look at a machine, at a plan, at what was compiled.

    Exit status: 0 done, 1 the answer is no, 2 the command cannot be carried out as typed.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


commands.add_command(doctor)
commands.add_command(calibrate)
commands.add_command(plan)
commands.add_command(report)
commands.add_command(diff)
