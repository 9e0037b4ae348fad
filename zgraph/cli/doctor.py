"""`zgraph doctor`: checks whether the machines of a training run have everything needed, and measures their speed."""

from __future__ import annotations

import json
import platform
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import click

from zgraph.cli.calibrate import table_of
from zgraph.cli.ranks import is_launched, launched_ranks, rank_of_launch
from zgraph.cli.terminal import json_option, print_json, print_tables, working
from zgraph.reporting.tables import Table

if TYPE_CHECKING:
    from zgraph.analysis.hardware import Hardware
    from zgraph.cli.machine_checks import Check

STYLES = MappingProxyType({"missing": "bold red", "note": "yellow", "ok": "green"})


@click.command()
@click.option("--no-rates", is_flag=True, help="Leave out rates of copies and links, which take seconds to measure.")
@json_option
def doctor(no_rates: bool, as_json: bool) -> int:
    """Check that this machine has everything that a training run needs, and say how to get what is missing.

    If torchrun has started this command on every rank, it also connects the ranks and measures their links; rank 0
    prints. The rates are the results of `zgraph calibrate`. Exit status 1: something is missing.
    """
    with working("looking at this machine"):
        checks, hardware = _examine(rates=not no_rates)
    ready = all(check.status != "missing" for check in checks)
    if rank_of_launch() != 0:
        return 0 if ready else 1
    if as_json:
        rates = None if hardware is None else json.loads(hardware.to_json())
        print_json({"ready": ready, "checks": [check.as_json() for check in checks], "hardware": rates})
    else:
        print_tables([_table(checks), *([] if hardware is None else [table_of(hardware)])], **STYLES)
        click.echo("ready to train" if ready else "not ready to train: see what is missing")
    return 0 if ready else 1


def _examine(*, rates: bool) -> tuple[list[Check], Hardware | None]:
    from zgraph.cli.machine_checks import Check, check_machine

    checks = check_machine()
    if any(check.name == "torch" and check.status == "missing" for check in checks):
        return checks, None
    from zgraph.analysis.calibration import calibrate

    try:
        with launched_ranks():
            if is_launched():
                checks = [*checks, *_of_other_hosts(checks), _connected()]
            return checks, calibrate() if rates else None
    except (RuntimeError, ValueError, OSError) as error:
        found = str(error).partition("\n")[0]
        advice = "compare the interface of gloo, MASTER_ADDR and MASTER_PORT on all hosts"
        return [*checks, Check(group="ranks", name="group", found=found, status="missing", advice=advice)], None


def _connected() -> Check:
    import torch.distributed as dist

    from zgraph.cli.machine_checks import Check

    return Check(group="ranks", name="group", found=f"{dist.get_world_size()} ranks on {dist.get_backend()}")


def _of_other_hosts(checks: list[Check]) -> list[Check]:
    """Gather the checks of the other hosts, and return those whose status is not "ok"."""
    import torch.distributed as dist

    wanting = [check for check in checks if check.status != "ok"]
    everyone: list[tuple[str, list[Check]]] = [("", [])] * dist.get_world_size()
    dist.all_gather_object(everyone, (platform.node(), wanting))
    hosts = {host: found for host, found in everyone if host != platform.node()}
    return [replace(check, name=f"{check.name} on {host}") for host, found in hosts.items() for check in found]


def _table(checks: list[Check]) -> Table:
    rows: list[tuple[str, ...]] = []
    for group in dict.fromkeys(check.group for check in checks):
        found = [check for check in checks if check.group == group]
        rows += [
            ("" if check is not found[0] else group, check.name, check.status, check.found, check.advice)
            for check in found
        ]
    return Table(platform.node(), ("", "", "", "found", "what to do"), tuple(rows))
