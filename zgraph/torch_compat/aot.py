"""AOTAutograd and `make_fx`: traced graphs, their inputs, their partition, and calls that empty their lists."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportUntypedBaseClass=false

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

from torch import Tensor, fx
from torch.fx.graph import CodeGen

from zgraph.torch_compat.inductor import inductor_decompositions
from zgraph.torch_compat.operators import written_arguments

Compiler = Callable[[fx.GraphModule, Sequence[Any]], Callable[[list[Any]], Any]]


Partitioner = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]


def aot_autograd(
    *,
    compile_forward: Compiler,
    compile_backward: Compiler,
    compile_inference: Compiler,
    partition: Partitioner,
    decompose: bool = False,
) -> Callable[..., Any]:
    """A Dynamo backend that traces forward and backward (2.11 - 2.15).

    `decompose` takes operators apart as Inductor needs it; else they stay what they are in eager mode.

    `functorch.compile.aot_module_simplified` is the public part of it, but would leave the generated backward visible
    to Dynamo.
    """
    from torch._dynamo.backends.common import aot_autograd as build

    def compile_forward_and_keep(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        _donate_nothing()
        return compile_forward(gm, inputs)

    return build(
        fw_compiler=compile_forward_and_keep,
        bw_compiler=compile_backward,
        inference_compiler=compile_inference,
        partition_fn=partition,
        decompositions=inductor_decompositions() if decompose else {},
    )


def _donate_nothing() -> None:
    """Let a backward with `retain_graph=True` follow one without, on the same graph (2.11 - 2.15).

    AOTAutograd lists the saved tensors that a compiled backward may overwrite, and then refuses to keep them. Islands
    overwrite none, and its option (`donated_buffer`) would have to be off when the user calls backward. The metadata
    that the refusal reads and the metadata of the context hold one list.
    """
    from torch._guards import TracingContext

    metadata: Any = TracingContext.get().fw_metadata
    if metadata is not None and metadata.bw_donated_idxs:
        metadata.bw_donated_idxs.clear()


def min_cut_partition(joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """torch's min-cut partitioner, which honours `meta["recompute"]`.

    2.11 - 2.15: where Inductor may draw in its own way (`fallback_random` is off), operators on GPUs that backward
    computes again draw from generators of the graph instead of the device's.
    """
    from functorch.compile import min_cut_rematerialization_partition
    from torch._inductor import config

    with config.patch(fallback_random=True):
        return min_cut_rematerialization_partition(joint, inputs, **kwargs)


def fusible_operators() -> frozenset[object]:
    """What torch's partitioner counts on compilers to fuse, overloads together (`get_default_op_list`, 2.11 - 2.15)."""
    from torch._functorch.partitioners import get_default_op_list

    return frozenset(get_default_op_list().fusible_ops)


def may_be_written(node: fx.Node) -> bool:
    """Whether AOTAutograd lets a saved tensor change until backward reads it (2.11 - 2.15)."""
    return bool(node.meta.get("saved_tensor_with_no_vc_check", False))


def rng_state_operators() -> tuple[object, object]:
    """What the partitioner wraps random operators in that backward computes again (2.11 - 2.15).

    `save(operator, ...)` returns the generator's state and the operator's result, `run(state, operator, ...)` the
    result.
    """
    from torch._prims import rng_prims

    return rng_prims.run_and_save_rng_state, rng_prims.run_with_rng_state


def aot_input_index(node: fx.Node) -> int | None:
    """Which input of the Dynamo graph a joint-graph placeholder came from; None for tangents and unknown kinds.

    2.11 - 2.15 leave a descriptor in `meta["desc"]`; DTensor inputs are flattened, so several placeholders may share
    one index.
    """
    described: Any = node.meta.get("desc")
    while described is not None and hasattr(described, "base"):
        described = described.base
    index = getattr(described, "idx", None)
    return index if isinstance(index, int) else None


def is_tangent(node: fx.Node) -> bool:
    """Whether a joint-graph placeholder is a gradient of an output, by its name as in the partitioner (2.11 - 2.15)."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def mutated_inputs(graph: fx.Graph) -> list[fx.Node]:
    """Inputs of a joint graph that hold something else once the step has run (2.11 - 2.15).

    Nodes write to them, or an output describes itself (`meta["desc"]`) as what is copied into one afterwards.
    """
    written = [node for call in graph.nodes for node in written_arguments(call)]
    output = next(iter(reversed(graph.nodes)))
    copied = [getattr(one, "mutated_input", None) for one in output.meta.get("desc", ())]
    return [
        node
        for node in graph.find_nodes(op="placeholder")
        if node in written or any(node.meta.get("desc") == one for one in copied if one is not None)
    ]


def boxed(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Tell AOTAutograd that `run` takes one list and empties it (`_boxed_call`, 2.11 - 2.15)."""
    run._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
    return run


class BoxedCodeGen(CodeGen):
    """Generated code takes one list and empties it, so that each input dies at its last use.

    2.12 and newer carry the same class under a private name; 2.11 does not.
    """

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, *, expanded_def: bool = False) -> str:
        names = [name.split(":")[0].split("=")[0].strip() for name in free_vars if name != "self"]
        lines = [f"def {getattr(self, '_func_name', 'forward')}(self, args_list){maybe_return_annotation}:"]
        if names:
            lines.append(f"    {', '.join(names)}, = args_list")
        lines.append("    args_list.clear()")
        return "\n".join(lines)


def trace(function: Callable[..., Any], fakes: Sequence[Any], mode: Any, *, decompose: bool) -> fx.GraphModule:
    """`make_fx` of a function of fake tensors and numbers: forward, backward and whatever it runs, as one graph.

    Args:
        function: returns a flat list of tensors.
        fakes: its arguments, made by the mode.
        mode: what `step_mode` returned.
        decompose: take operators apart as Inductor needs it.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    # 2.11 - 2.15: operators that read a tensor's value are traced as nodes whose result is a symbol.
    table: Mapping[Any, Any] = inductor_decompositions() if decompose else {}
    with mode:
        return make_fx(function, decomposition_table=dict(table), _error_on_data_dependent_ops=False)(*fakes)


def _graph() -> fx.Graph | None:
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode: Any = get_proxy_mode()
    return None if mode is None else mode.tracer.graph


def without_graph() -> AbstractContextManager[Any]:
    """Keep what is done with symbolic numbers out of the graph (`disable_proxy_modes_tracing`, 2.11 - 2.15)."""
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    return disable_proxy_modes_tracing()


def newest_node() -> fx.Node | None:
    """The last node of the graph that `make_fx` is making (`get_proxy_mode`, 2.11 - 2.15)."""
    graph = _graph()
    return None if graph is None else next(iter(reversed(graph.nodes)), graph._root)


def nodes_after(node: fx.Node | None) -> Iterator[fx.Node]:
    """The nodes that were made since; their doubly linked list ends at its root (`_root`, 2.11 - 2.15)."""
    while node is not None and (node := node.next).op != "root":
        yield node


def node_of_number(number: Any) -> fx.Node:
    """The node whose result a symbolic number is, in the graph that is being made (`get_proxy_slot`, 2.11 - 2.15)."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

    mode: Any = get_proxy_mode()
    return cast(Any, get_proxy_slot(number, mode.tracer)).force().node


def forget_constant(literal: Tensor) -> None:
    """Let the tensor of a literal be like any other in the graph that is being made (2.11 - 2.15).

    FakeTensorMode and `make_fx` compute at once what is computed of literals alone (`FakeTensor.constant`,
    `_ProxyTensor.constant`). For the former a symbolic number among the arguments is a NaN; the latter misses what
    foreach operators write.
    """
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

    mode: Any = get_proxy_mode()
    if isinstance(literal, FakeTensor):
        literal.constant = None
        if mode is not None:
            cast(Any, get_proxy_slot(literal, mode.tracer)).constant = None


def let_stand_for(number: Any, other: Any) -> None:
    """Give a symbolic number the node of another one (`set_proxy_slot`, 2.11 - 2.15)."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, set_proxy_slot

    tracer: Any = cast(Any, get_proxy_mode()).tracer
    set_proxy_slot(number, tracer, get_proxy_slot(other, tracer))
