"""Options of Inductor that a user sets for the whole program, and what islands take over of them."""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch._dynamo.utils import counters
from torch._inductor import config
from torch.fx.experimental.proxy_tensor import make_fx

from zgraph.torch_compat.fake_values import fake_mode
from zgraph.torch_compat.inductor import compile_with_inductor


def captured(function: object, *inputs: Tensor) -> fx.GraphModule:
    """A functional graph without values, as an island is."""
    with fake_mode() as mode:
        fakes = [mode.from_tensor(value) for value in inputs]
        return make_fx(function)(*fakes)  # pyright: ignore[reportArgumentType]


def compiled(function: object, *inputs: Tensor) -> list[Tensor]:
    gm = captured(function, *inputs)
    fakes = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    return compile_with_inductor(gm, fakes)(list(inputs))


def test_no_island_is_captured_as_a_cuda_graph() -> None:
    """Its inputs lie elsewhere in each step: what collectives write is allocated anew."""
    x = torch.randn(8, 8)
    before = counters["inductor"]["cudagraph_skips"]  # on the CPU the wish alone is counted
    with config.patch({"triton.cudagraphs": True, "force_disable_caches": True}):
        (found,) = compiled(lambda x: (x.sin() + 1,), x)
    assert counters["inductor"]["cudagraph_skips"] == before
    torch.testing.assert_close(found, x.sin() + 1)


def test_outputs_keep_the_strides_with_which_the_rest_was_traced() -> None:
    """Rows of 1031 are those that Inductor pads, on GPUs by default; outputs where `pad_outputs` is set."""
    x = torch.randn(4, 1031)
    with config.patch({"disable_padding_cpu": False, "pad_outputs": True, "force_disable_caches": True}):
        (found,) = compiled(lambda x: (x.sin() + 1,), x)
    assert found.stride() == x.stride()


def test_kernels_may_be_chosen_by_measurement() -> None:
    """max_autotune and its like change no order, and are left to the user."""
    x, y = torch.randn(16, 32), torch.randn(32, 16)
    options = {"max_autotune": True, "max_autotune_gemm": True, "coordinate_descent_tuning": True, "freezing": True}
    with config.patch(options | {"cpp_wrapper": True, "combo_kernels": True, "force_disable_caches": True}):
        (found,) = compiled(lambda x, y: (torch.relu(x @ y) + 1,), x, y)
    torch.testing.assert_close(found, torch.relu(x @ y) + 1)
