"""`zgraph plan`: predicts memory, traffic and time of a training step on each rank of a cluster."""

from __future__ import annotations

import functools
import importlib
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zgraph.cli.report import rebuild
from zgraph.cli.terminal import UserError, json_option, print_json, print_tables, working
from zgraph.errors import ZgraphError

if TYPE_CHECKING:
    from zgraph.analysis.hardware import Hardware
    from zgraph.planner.outer_rounds import OuterPlan
    from zgraph.planner.planned_step import Plan

Step = tuple[Any, tuple[Any, ...]]  # a model, and the arguments of one rank's forward
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?)b|b)?", re.IGNORECASE)

_INNER = re.compile(r"\bgot (\w+(?:Error|Exception)\(.*\))")


class ByteSize(click.ParamType):
    """Option type for a size in bytes: "60GiB" (powers of 1024), "60GB" (powers of 1000) or "64" (bytes)."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        found = _SIZE.fullmatch(str(value).strip())
        if found is None:
            self.fail(f"{value!r} is not a size; write it as 60GiB, 1.5GB or 512MiB.", param, ctx)
        number, prefix, binary = found.groups()
        power = "kmgt".index(prefix.lower()) + 1 if prefix else 0
        count = int(float(number) * (1024 if binary else 1000) ** power)
        if count < 1:
            self.fail(f"{value!r} holds nothing; write a size such as 60GiB.", param, ctx)
        return count


class AxisSizes(click.ParamType):
    """Option type for the sizes of a cluster's axes, outermost first: "pp=4,dp=8"."""

    name = "axes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, int]:
        found: dict[str, int] = {}
        for part in str(value).split(","):
            name, equals, size = (text.strip() for text in part.partition("="))
            if not (equals and name and size.isdecimal()) or name in found:
                self.fail(f"{value!r} names no axes with their sizes; write them as pp=4,dp=8.", param, ctx)
            found[name] = int(size)
        return found


@click.command()
@click.argument("function", metavar="MODULE:FN")
@click.option("--world-size", type=click.IntRange(min=1), help="Ranks of the cluster.")
@click.option("--world", type=AxisSizes(), help="Or its axes, the outermost first, such as pp=4,dp=8.")
@click.option("--micro-batches", type=click.IntRange(min=1), help="Number in a step, with a pp axis.")
@click.option("--hardware", default="h100", show_default=True, help="A preset, or a file made by `calibrate --json`.")
@click.option("--budget", type=ByteSize(), help="Most memory of a step, such as 60GiB; passes then schedule by costs.")
@click.option("--zero-stage", type=click.IntRange(0, 3), default=3, show_default=True, help="As in zgraph.shard.")
@click.option("--param-dtype", type=click.Choice(["bfloat16", "float16", "float32"]), help="As in zgraph.shard.")
@click.option(
    "--optimizer",
    type=click.Choice(["adam", "adamw", "sgd"]),
    help="Plan its step too, as zgraph.training_step runs it; otherwise only forward and backward.",
)
@click.option("--sites", type=click.IntRange(min=2), help="Plan outer steps between so many of these clusters.")
@click.option("--site-link", help="Rate of each site's link, such as 100mbit, with --sites.")
@click.option("--every", type=click.IntRange(min=1), default=30, show_default=True, help="As in zgraph.OuterSteps.")
@click.option(
    "--html", type=click.Path(path_type=Path), help="Folder for a report of the plan, with a page to look at."
)
@json_option
def plan(
    function: str,
    world_size: int | None,
    world: dict[str, int] | None,
    micro_batches: int | None,
    hardware: str,
    budget: int | None,
    zero_stage: int,
    param_dtype: str | None,
    optimizer: str | None,
    sites: int | None,
    site_link: str | None,
    every: int,
    html: Path | None,
    as_json: bool,
) -> None:
    """Predict memory, traffic and time of a training step on a cluster, without the cluster.

    MODULE:FN names a function without arguments, such as train:step for the function step in train.py. The function
    returns a model and a tuple: the arguments of the model's forward on one rank. Tensors created by the function have
    shapes but no values, so the model may be larger than this machine's memory. With a pp axis the model is an
    nn.Sequential or a list of stages, and the arguments are those of one micro-batch. With a cp axis, whose ranks share
    sequences, the arguments are [batch, s / cp, ...].
    """
    if (world_size is None) == (world is None):
        raise click.UsageError("Write the number of ranks as --world-size 64, or their axes as --world pp=4,dp=16.")
    if world is not None and world.get("tp", 1) > 1:
        raise click.UsageError("This command cannot split a model over tp; call zgraph.plan with a shard_fn.")
    is_pipeline = world is not None and world.get("pp", 1) > 1
    if is_pipeline and optimizer is not None:
        raise click.UsageError("A pipeline's schedule runs outside whole steps; leave --optimizer out.")
    if is_pipeline and micro_batches is None:
        raise click.UsageError("A pipeline needs the number of micro-batches; write --micro-batches 8.")
    if not is_pipeline and micro_batches is not None:
        raise click.UsageError("--micro-batches belongs to a pipeline; add its ranks, such as --world pp=4,dp=16.")
    if (sites is None) != (site_link is None):
        raise click.UsageError("Outer steps need the number of sites and their link: --sites 2 --site-link 100mbit.")
    if sites is not None and is_pipeline:
        raise click.UsageError("Outer steps of a pipeline are planned stage by stage; leave --sites or pp out.")
    with working("planning"):
        step = function_named(function)
        machine = hardware_named(hardware)
        found = _planned(
            step,
            machine,
            budget,
            zero_stage,
            param_dtype,
            optimizer,
            world_size=world_size,
            world=world,
            micro_batches=micro_batches,
        )
        outer: OuterPlan | None = None
        if sites is not None and site_link is not None:
            try:
                outer = found.outer_steps(sites=sites, link=site_link, every=every)
            except ValueError as error:
                raise UserError(str(error)) from error
        written = None if html is None else _write(found, html, outer)
    if as_json:
        more = {} if written is None else {"report": str(written)}
        print_json(found.as_json() | more | ({} if outer is None else {"outer_steps": asdict(outer)}))
        return
    print_tables(found.tables())
    if outer is not None:
        click.echo(str(outer))
    if written is not None:
        click.echo(f"report: {written}")


def _write(found: Plan, directory: Path, outer: OuterPlan | None) -> Path:
    """Write a plan's report to a folder; return the path of its page."""
    if not any(found.report(directory, outer).rglob("report.json")):  # zgraph has warned of the reason
        raise UserError(f"the report cannot be written to {directory}.")
    return rebuild(directory)[0]


def _planned(
    step: Callable[[], Any],
    machine: Hardware,
    budget: int | None,
    zero_stage: int,
    param_dtype: str | None,
    optimizer: str | None,
    *,
    world_size: int | None,
    world: dict[str, int] | None,
    micro_batches: int | None,
) -> Plan:
    import torch

    from zgraph.compiler.pass_list import PassList
    from zgraph.compiler.target import Target
    from zgraph.passes import presets
    from zgraph.planner.plan import plan
    from zgraph.planner.plan_pipeline import plan_pipeline
    from zgraph.planner.schedules.axes import Axes
    from zgraph.sharding.shard import shard

    if world is not None:
        try:
            Axes(world)
        except ValueError as error:
            raise UserError(str(error)) from error
    passes = None
    if budget is not None:
        target = Target(hardware=machine, budget_bytes=budget)
        passes = PassList(presets.planned(), target=target)
    dtype = getattr(torch, param_dtype) if param_dtype else None
    made: list[Step] = []  # made for the model, and then used for the batch

    def make_model() -> Any:
        made.append(call(step))
        return made[0][0]

    try:
        shared: dict[str, Any] = {
            "batch": lambda: made[0][1],
            "shard_fn": functools.partial(
                shard, zero_stage=zero_stage, param_dtype=dtype, context="cp" if "cp" in (world or {}) else None
            ),
            "hardware": machine,
            "passes": passes,
        }
        if world is not None and world.get("pp", 1) > 1:
            return plan_pipeline(make_model, world=world, micro_batches=micro_batches, **shared)
        update = None if optimizer is None else optimizer_named(optimizer)
        return plan(make_model, world_size=world_size, world=world, optimizer_fn=update, **shared)
    except (click.ClickException, ZgraphError):
        raise
    except Exception as error:
        if str(error).startswith("zgraph"):  # zgraph's error, wrapped by the compiler
            raise ZgraphError(str(error)) from error
        raise UserError(f"the step cannot be compiled: {_in_one_line(error)}") from error


def optimizer_named(name: str) -> Callable[[Any], Any]:
    """Return a function that creates the named fused optimizer for a model's parameters."""
    import torch

    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[name]
    return lambda model: kind(model.parameters(), fused=True)


def call(step: Callable[[], Any]) -> Step:
    """Call the user's function, and return its model and arguments after a check.

    Raises:
        UserError: the function failed, or returned something else.
    """
    try:
        made = step()
    except Exception as error:
        raise UserError(f"the function failed: {_in_one_line(error)}") from error
    import torch

    match made:
        case (torch.nn.Module() | list() as model, tuple() | list() as inputs):
            return model, tuple(inputs)
        case _:
            kind = "(" + ", ".join(type(part).__name__ for part in made) + ")" if isinstance(made, tuple) else made
            raise UserError(
                f"the function returned {kind if isinstance(kind, str) else type(kind).__name__}; return a model and "
                "the tuple of its forward's arguments."
            )


def function_named(text: str) -> Callable[[], Any]:
    """Import and return the function named by MODULE:FN; the current folder is searched first.

    Raises:
        UserError: there is no such module or function, or the module cannot be imported.
    """
    module_name, colon, name = text.partition(":")
    if not (colon and module_name and name):
        raise UserError(f"{text!r} names no function; write MODULE:FN, such as train:step.")
    if module_name.endswith(".py"):
        raise UserError(f"{text!r} is a file; write {Path(module_name).stem}:{name}, in the folder of {module_name}.")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise UserError(f"there is no module {error.name!r} here or among the installed ones.") from error
        raise UserError(f"module {module_name!r} cannot be imported: {_in_one_line(error)}") from error
    except Exception as error:
        raise UserError(f"module {module_name!r} cannot be imported: {_in_one_line(error)}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise UserError(f"module {module_name!r} has no function {name!r}.")
        found = getattr(found, part)
    if not callable(found):
        raise UserError(f"{text} is a {type(found).__name__}, not a function.")
    return found


def hardware_named(text: str) -> Hardware:
    """Return a hardware preset by name, or the hardware in a file written by `zgraph calibrate --json`.

    Raises:
        UserError: there is neither such a preset nor such a file.
    """
    from zgraph.analysis.hardware import Hardware

    path = Path(text)
    if not path.is_file() and (path.suffix or len(path.parts) > 1 or path.is_dir()):
        raise UserError(
            f"there is no file {text!r} with hardware; write one with zgraph calibrate --json > machine.json, or name "
            "a preset, such as h100."
        )
    try:
        return Hardware.from_json(path.read_text()) if path.is_file() else Hardware.preset(text)
    except (OSError, ValueError) as error:
        raise UserError(str(error)) from error


def _in_one_line(error: BaseException) -> str:
    """Return one line about an error: its first cause, and the innermost line of the user's code that led to it."""
    while error.__cause__ is not None:
        error = error.__cause__
    inner = _INNER.search(str(error))  # the original error in Dynamo's long text
    first = inner[1] if inner else f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _is_installed(Path(frame.filename))]
    where = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    return f"{first}{where}"


def _is_installed(path: Path) -> bool:
    """Return whether a file belongs to zgraph, to an installed package, or to Python."""
    return Path(__file__).parent in path.parents or "site-packages" in path.parts or not path.is_file()
