"""Graphs that read parameters from the host of a GPU: copies become the planner's, and nothing else may read them."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from zgraph.compiler.inputs_at_rest import check_only_copied, take_to_device
from zgraph.dialect.copies import reload_op, wait_copy_op
from zgraph.errors import ZgraphError
from zgraph.graph import meta, nodes
from zgraph.tiers.tier import HOST
from zgraph.torch_compat.fake_values import fake_mode

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)


def captured(*, dtype: torch.dtype | None = None) -> fx.GraphModule:
    """y = shard (cpu) to the GPU, twice; the gradient back to the host.

    Args:
        dtype: to which the copies cast, too; None: they do not.
    """
    graph = fx.Graph()
    with fake_mode():
        shard, grad = graph.placeholder("shard"), graph.placeholder("grad")
        meta.set_value(shard, torch.empty(4))
        meta.set_value(grad, torch.empty(4, device=CUDA))
        meta.set_space(shard, HOST)
        options = {"device": CUDA} if dtype is None else {"device": CUDA, "dtype": dtype}
        copies = [meta.create(graph, aten._to_copy.default, (shard,), options) for _ in range(2)]
        product = meta.create(graph, aten.mul.Tensor, copies)
        back = meta.create(graph, aten._to_copy.default, (grad,), {"device": torch.device("cpu")})
        late = meta.create(graph, aten.neg.default, (product,))
        graph.output((late, back))
    return fx.GraphModule({}, graph)


def test_the_copies_of_modules_become_those_of_the_plan() -> None:
    gm = captured()
    assert take_to_device(gm.graph)
    (shard, _) = gm.graph.find_nodes(op="placeholder")
    assert meta.tensor_value(shard).device == CUDA and meta.kept_as(shard) == "parameters"
    assert [user.target for user in shard.users] == [aten.mul.Tensor]
    names = [node.name for node in nodes.call_functions(gm.graph, lambda node: True)]
    assert names == ["mul_tensor", "neg_default", "offload_grad", "kept_offload_grad"], "gradients leave at the end"
    kept = nodes.returned_by(gm.graph)[1]
    assert isinstance(kept, fx.Node) and meta.space(kept) == HOST
    assert meta.tensor_value(kept).device.type == "cpu"
    assert not take_to_device(gm.graph), "nothing is left to do"


def test_a_copy_that_casts_as_well_is_left_alone() -> None:
    """Two roundings could hide in it."""
    gm = captured(dtype=torch.bfloat16)
    assert not take_to_device(gm.graph)
    (shard, _) = gm.graph.find_nodes(op="placeholder")
    assert meta.tensor_value(shard).device.type == "cpu"


def test_who_reads_the_host_is_named() -> None:
    gm = captured()
    take_to_device(gm.graph)
    with pytest.raises(ZgraphError, match=r"mul_tensor \(aten\.mul\.Tensor\) reads shard, which is stored on the host"):
        check_only_copied(gm.graph)
    (shard, _) = gm.graph.find_nodes(op="placeholder")
    (reader,) = shard.users
    with gm.graph.inserting_before(reader):
        start = meta.create(gm.graph, reload_op(), (shard, CUDA))
        here = meta.create(gm.graph, wait_copy_op(), (start,))
    reader.replace_input_with(shard, here)
    check_only_copied(gm.graph)


def test_host_tensors_may_be_read_if_device_is_cpu() -> None:
    graph = fx.Graph()
    with fake_mode():
        shard = graph.placeholder("shard")
        meta.set_value(shard, torch.empty(4))
        meta.set_space(shard, HOST)
        graph.output((meta.create(graph, aten.neg.default, (shard,)),))
    check_only_copied(graph)
