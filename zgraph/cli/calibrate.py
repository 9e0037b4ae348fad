"""`zgraph calibrate`: measures the machine and the links between ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from zgraph.cli.ranks import launched_ranks, rank_of_launch
from zgraph.cli.terminal import json_option, print_tables, working
from zgraph.reporting.tables import Table, duration, rate, size

if TYPE_CHECKING:
    from zgraph.analysis.hardware import Hardware, Link

NOT_MEASURED = "; not measured"


@click.command()
@click.option("--refresh", is_flag=True, help="Measure again instead of reading an earlier result.")
@click.option("--cache", type=click.Path(path_type=Path), help="Folder for the result; ~/.cache/zgraph by default.")
@json_option
def calibrate(refresh: bool, cache: Path | None, as_json: bool) -> None:
    """Measure the speed of copies, matrix products and links between ranks.

    Takes a few seconds the first time; later calls read the result from a file. Links are measured only if torchrun has
    started this command on every rank; rank 0 prints. `zgraph plan --hardware FILE` reads the output of --json.
    """
    with working("measuring"):
        hardware = measured(refresh=refresh, cache=cache)
    if rank_of_launch() != 0:
        return
    if as_json:
        click.echo(hardware.to_json())
    else:
        print_tables([table_of(hardware)])


def measured(*, refresh: bool = False, cache: Path | None = None) -> Hardware:
    """Measure this machine and return the results; under torchrun, all ranks get equal results."""
    from zgraph.analysis.calibration import calibrate as calibrate_ranks

    with launched_ranks():
        return calibrate_ranks(cache=cache, refresh=refresh)


def table_of(hardware: Hardware) -> Table:
    """Return the measured hardware as a table. Links that were not measured are marked, and have typical values."""
    rows = [
        ("backend", hardware.backend),
        ("memory of a rank", size(hardware.memory_bytes)),
        ("memory rate, read and write together", rate(hardware.memory_bytes_per_us)),
        *(
            (f"matrix products in {str(dtype).removeprefix('torch.')}", _flops(flops))
            for dtype, flops in hardware.flops_per_us.items()
        ),
        ("smallest kernel", duration(hardware.launch_us)),
        ("ranks of a host", str(hardware.ranks_per_host)),
        ("link inside a host", _link(hardware.intra_host) + ("" if hardware.links else NOT_MEASURED)),
        ("link between hosts", _link(hardware.inter_host) + ("" if hardware.links else NOT_MEASURED)),
        *((f"link of ranks {stride} apart", _link(link)) for stride, link in hardware.links.items()),
        ("host to device", _link(hardware.host_to_device)),
        ("device to host", _link(hardware.device_to_host)),
        ("both ways at once", f"{hardware.host_gain_both_ways:.2g} times the rate of one way"),
        ("disk", _link(hardware.disk) + NOT_MEASURED),
        ("compute time of a collective", duration(hardware.cpu_us_per_collective)),
        ("compute time of a MiB on the wire", duration(hardware.cpu_us_per_wire_byte * 2**20)),
    ]
    return Table(hardware.name, (), tuple(rows))


def _flops(per_us: float) -> str:
    return f"{per_us / 1e6:.3g} TFLOP/s" if per_us >= 1e6 else f"{per_us / 1e3:.3g} GFLOP/s"


def _link(link: Link) -> str:
    gain = f", {link.gain_at_once:.2g} times that for several at once" if link.gain_at_once > 1 else ""
    return f"{rate(link.bytes_per_us)}, {duration(link.latency_us)} a message{gain}"
