"""Make compiled graphs take local shards instead of DTensors, which saves DTensor's overhead per parameter and call.

Dynamo's graph reads a parameter as `parameter.to_local()`. If the graph's inputs are DTensors, AOTAutograd unwraps each
input before every forward, and wraps its gradient in a new DTensor after every backward.

While Dynamo traces, `read_whole` stands for `unshard(parameter.to_local(), ...)`, which takes it four times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor

from zgraph.dialect.markers import unshard
from zgraph.graph import nodes
from zgraph.sharding.tensors.sharded_tensor import as_sharded, sharded_like
from zgraph.torch_compat.aot import is_tracing
from zgraph.torch_compat.dtensor import local_of
from zgraph.torch_compat.dynamo import checkpoint_operator, dynamo_fake, is_to_local
from zgraph.torch_compat.fake_values import is_fake

Compile = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


def read_whole(parameter: DTensor, handle: Tensor, shape: Sequence[int], *arguments: Any) -> Tensor:
    """Return the unsharded parameter; a call in a graph of Dynamo's, see `markers_for_reads`.

    Args:
        parameter: the sharded parameter.
        handle, shape, arguments: as for `zgraph.dialect.markers.unshard`.
    """
    if is_fake(local_of(parameter)) and not is_tracing():
        return _Whole.apply(parameter, shape, arguments[0])
    return unshard(parameter.to_local(), handle, shape, *arguments)  # in a graph that another backend runs


class _Whole(torch.autograd.Function):
    """Autograd function whose output has the metadata of the unsharded parameter, without values."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return local_of(parameter).new_empty(shape, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise NotImplementedError("Dynamo runs no backward")


def markers_for_reads(gm: fx.GraphModule) -> None:
    """Replace each `read_whole` in a graph of Dynamo's by `to_local` and `unshard`."""
    found = list(nodes.call_functions(gm.graph, lambda node: node.target is read_whole))
    for node in found:
        parameter, *arguments = node.args
        with gm.graph.inserting_before(node):
            shard = gm.graph.call_method("to_local", (parameter,))
            marker = gm.graph.call_function(torch.ops.zgraph.unshard.default, (shard, *arguments))
        marker.meta = node.meta
        node.replace_all_uses_with(marker)
        gm.graph.erase_node(node)
    if found:
        gm.recompile()


def compile_on_local_shards(gm: fx.GraphModule, inputs: Sequence[Any], compile: Compile) -> Callable[..., Any]:
    """Compile Dynamo's graph with local shards in place of its DTensor inputs.

    Args:
        gm: Dynamo's graph, which is changed in place, with the graphs of its checkpointed regions. An input stays a
            DTensor if the graph does more with it than call `to_local()`.
        inputs: example inputs of the graph.
        compile: called with the changed graph and matching example inputs.

    Returns:
        A function that takes the original inputs, including DTensors. Gradients of DTensors are DTensors.
    """
    found = _take_local(gm)
    if not found:
        return compile(gm, inputs)
    positions = list(found)
    examples = list(inputs)
    for position, shard in found.items():
        examples[position] = shard
    compiled = compile(gm, examples)

    def run(*args: Any) -> Any:
        given = list(args)
        shards = local_shards([given[position] for position in positions])
        for position, shard in zip(positions, shards, strict=True):
            given[position] = shard
        return compiled(*given)

    return run


def _take_local(gm: fx.GraphModule) -> dict[int, Tensor]:
    """Replace `input.to_local()` by the input itself, and return fake local shards of the changed inputs, by index."""
    settled: dict[int, Tensor] = {}
    changed: dict[fx.GraphModule, None] = {}
    for position, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        value = dynamo_fake(node)
        if not isinstance(value, DTensor) or (reads := _local_reads(gm, node)) is None:
            continue
        for reader, taken in reads:
            taken.replace_all_uses_with(taken.all_input_nodes[0])
            reader.graph.erase_node(taken)
            changed[reader] = None
        with torch.no_grad():
            settled[position] = value.to_local().detach().requires_grad_(value.requires_grad)
    for reader in changed:
        reader.recompile()
    return settled


def _local_reads(gm: fx.GraphModule, node: fx.Node) -> list[tuple[fx.GraphModule, fx.Node]] | None:
    """Return all `to_local()` calls on an input, each with its graph; None if the input has any other reader.

    Graphs of checkpointed regions are searched, too.
    """
    found: list[tuple[fx.GraphModule, fx.Node]] = []
    for user in node.users:
        if is_to_local(user):
            found.append((gm, user))
            continue
        body = _checkpointed_body(gm, user)
        if body is None or node in user.kwargs.values():
            return None
        operands = zip(user.args[1:], body.graph.find_nodes(op="placeholder"), strict=True)
        for inner in [_local_reads(body, read) for operand, read in operands if operand is node]:
            if inner is None:
                return None
            found.extend(inner)
    return found


def _checkpointed_body(gm: fx.GraphModule, node: fx.Node) -> fx.GraphModule | None:
    """Return the graph of the checkpointed region that `node` runs; None if there is none, or other nodes share it."""
    body = node.args[0] if node.op == "call_function" and node.target is checkpoint_operator() else None
    if not isinstance(body, fx.Node) or len(body.users) > 1:
        return None
    if len(gm.graph.find_nodes(op="get_attr", target=body.target)) > 1:
        return None
    return cast(fx.GraphModule, gm.get_submodule(cast(str, body.target)))


def local_shards(parameters: Sequence[DTensor]) -> list[Tensor]:
    """Return the local shards of all parameters, through a single autograd node."""
    if not torch.is_grad_enabled():
        return [parameter.to_local() for parameter in parameters]
    tracked = iter(_LocalShards.apply(*[parameter for parameter in parameters if parameter.requires_grad]))
    return [next(tracked) if parameter.requires_grad else parameter.to_local() for parameter in parameters]


class _LocalShards(torch.autograd.Function):
    """Autograd function that returns the local shards of DTensors; its backward returns gradients as DTensors."""

    @staticmethod
    def forward(ctx: Any, *parameters: DTensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.parameters = parameters
        return tuple(parameter.to_local().detach() for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[DTensor | None, ...]:
        return tuple(
            None if grad is None else _gradient(grad, parameter)
            for grad, parameter in zip(grads, ctx.parameters, strict=True)
        )


def _gradient(grad: Tensor, parameter: DTensor) -> DTensor:
    if not torch.is_grad_enabled():
        return sharded_like(grad, parameter)
    # create_graph=True: a second derivative must reach the node that refuses it.
    shape, stride = parameter.shape, parameter.stride()
    made = DTensor.from_local(grad, parameter.device_mesh, parameter.placements, shape=shape, stride=stride)
    as_sharded(made, parameter)
    return made
