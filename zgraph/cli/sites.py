"""`zgraph sites`: keeps the store at which sites meet."""

from __future__ import annotations

import socket
import time

import click

from zgraph.cli.terminal import UserError, json_option, print_json


@click.command()
@click.option("--port", type=click.IntRange(0, 65535), default=29400, show_default=True, help="0: any free port.")
@json_option
def sites(port: int, as_json: bool) -> None:
    """Keep the store at which the sites of `zgraph.OuterSteps` meet, until this command is interrupted.

    Start it on a host that all sites reach, and that stays while sites come and leave. Little data passes through it:
    sites exchange parameters directly.
    """
    from zgraph.step.outer.meeting import Meeting, open_store

    try:
        store = open_store(port)
    except RuntimeError as error:
        raise UserError(f"port {port} cannot be opened: {error}; choose another one with --port.") from error
    address = f"{socket.gethostname()}:{store.port}"
    if as_json:
        print_json({"address": address, "port": store.port})
    else:
        click.echo(f'sites meet here: zgraph.OuterSteps(model, zgraph.Meeting("{Meeting(address).address}"))')
    while True:
        time.sleep(3600)
