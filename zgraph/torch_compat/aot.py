"""AOTAutograd and `make_fx`: traced graphs, their inputs, their partition, and boxed calls."""

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
    """Make a Dynamo backend that traces forward and backward with AOTAutograd (2.11 - 2.15).

    If `decompose` is true, Inductor's decompositions are applied; otherwise operators stay as in eager mode. The public
    `functorch.compile.aot_module_simplified` is not used, because it leaves the generated backward visible to Dynamo.
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
    """Let users call a compiled backward with `retain_graph=True` (2.11 - 2.15).

    AOTAutograd lists the saved tensors that a compiled backward may overwrite, and refuses `retain_graph=True` if the
    list is not empty. Islands, zgraph's compiled subgraphs, overwrite none. So the list is emptied here; AOTAutograd's
    check reads the same list. Its option `donated_buffer` does not help: it must be off when the user calls backward.
    """
    from torch._guards import TracingContext

    metadata: Any = TracingContext.get().fw_metadata
    if metadata is not None and metadata.bw_donated_idxs:
        metadata.bw_donated_idxs.clear()


def min_cut_partition(joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph into forward and backward by torch's min-cut partitioner, which honours `meta["recompute"]`.

    2.11 - 2.15: with Inductor's option `fallback_random` off, random GPU operators that backward recomputes draw from
    generators of the graph, not from the device's generator. So the option is on here.
    """
    from functorch.compile import min_cut_rematerialization_partition
    from torch._inductor import config

    with config.patch(fallback_random=True):
        return min_cut_rematerialization_partition(joint, inputs, **kwargs)


def fusible_operators() -> frozenset[object]:
    """The operators that torch's partitioner expects a compiler to fuse (`get_default_op_list`, 2.11 - 2.15)."""
    from torch._functorch.partitioners import get_default_op_list

    return frozenset(get_default_op_list().fusible_ops)


def may_be_written(node: fx.Node) -> bool:
    """Whether a node's result, saved for backward, may be written to before backward reads it (2.11 - 2.15)."""
    return bool(node.meta.get("saved_tensor_with_no_vc_check", False))


def rng_state_operators() -> tuple[object, object]:
    """The operators `save` and `run`, in which the partitioner wraps recomputed random operators (2.11 - 2.15).

    `save(operator, ...)` returns the generator's state and the operator's result, `run(state, operator, ...)` the
    result.
    """
    from torch._prims import rng_prims

    return rng_prims.run_and_save_rng_state, rng_prims.run_with_rng_state


def aot_input_index(node: fx.Node) -> int | None:
    """Index of the Dynamo graph's input from which a joint graph's placeholder comes; None for all other placeholders.

    2.11 - 2.15 leave a descriptor in `meta["desc"]`. DTensor inputs are flattened, so several placeholders may share
    one index. Tangents, the gradients of outputs, have none.
    """
    described: Any = node.meta.get("desc")
    while described is not None and hasattr(described, "base"):
        described = described.base
    index = getattr(described, "idx", None)
    return index if isinstance(index, int) else None


def is_tangent(node: fx.Node) -> bool:
    """Whether a node of a joint graph is a tangent, an output's gradient; judged by name, as in torch (2.11 - 2.15)."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def mutated_inputs(graph: fx.Graph) -> list[fx.Node]:
    """The placeholders of a joint graph whose inputs are modified (2.11 - 2.15).

    Either a node writes to the input, or the descriptor of an output (`meta["desc"]`) says that AOTAutograd copies this
    output into the input after the call.
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
    """Mark `run` as a function that accepts one list and empties it, for AOTAutograd (`_boxed_call`, 2.11 - 2.15)."""
    run._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
    return run


class BoxedCodeGen(CodeGen):
    """Code generator for graphs whose code accepts one list of inputs and empties it: inputs are freed at last use.

    2.12 and newer have the same class under a private name; 2.11 has none.
    """

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, *, expanded_def: bool = False) -> str:
        names = [name.split(":")[0].split("=")[0].strip() for name in free_vars if name != "self"]
        lines = [f"def {getattr(self, '_func_name', 'forward')}(self, args_list){maybe_return_annotation}:"]
        if names:
            lines.append(f"    {', '.join(names)}, = args_list")
        lines.append("    args_list.clear()")
        return "\n".join(lines)


def trace(function: Callable[..., Any], fakes: Sequence[Any], mode: Any, *, decompose: bool) -> fx.GraphModule:
    """Trace a function of fake tensors and numbers with `make_fx`: all that it runs, backward included, as one graph.

    Args:
        function: the function, which returns a flat list of tensors.
        fakes: arguments of the function, made by `mode`.
        mode: the fake mode from `step_mode`.
        decompose: whether to apply Inductor's decompositions.
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
    """Keep operations of a `with` block out of the traced graph (`disable_proxy_modes_tracing`, 2.11 - 2.15)."""
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    return disable_proxy_modes_tracing()


def newest_node() -> fx.Node | None:
    """The last node of the graph that `make_fx` is tracing (`get_proxy_mode`, 2.11 - 2.15)."""
    graph = _graph()
    return None if graph is None else next(iter(reversed(graph.nodes)), graph._root)


def nodes_after(node: fx.Node | None) -> Iterator[fx.Node]:
    """Yield the nodes after `node`; a graph's linked list of nodes ends at its root (`_root`, 2.11 - 2.15)."""
    while node is not None and (node := node.next).op != "root":
        yield node


def node_of_number(number: Any) -> fx.Node:
    """The node that produces a symbolic number in the graph being traced (`get_proxy_slot`, 2.11 - 2.15)."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

    mode: Any = get_proxy_mode()
    return cast(Any, get_proxy_slot(number, mode.tracer)).force().node


def forget_constant(literal: Tensor) -> None:
    """Forget the constant value of a literal tensor, so that the trace treats it like any other tensor (2.11 - 2.15).

    FakeTensorMode and `make_fx` fold operators whose tensor inputs are all literals (`FakeTensor.constant`,
    `_ProxyTensor.constant`). Both fold wrongly: FakeTensorMode reads a symbolic number among the arguments as NaN, and
    `make_fx` misses writes by foreach operators.
    """
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

    mode: Any = get_proxy_mode()
    if isinstance(literal, FakeTensor):
        literal.constant = None
        if mode is not None:
            cast(Any, get_proxy_slot(literal, mode.tracer)).constant = None


def let_stand_for(number: Any, other: Any) -> None:
    """Let the node of `other` stand for `number`, too, in the graph being traced (`set_proxy_slot`, 2.11 - 2.15)."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, set_proxy_slot

    tracer: Any = cast(Any, get_proxy_mode()).tracer
    set_proxy_slot(number, tracer, get_proxy_slot(other, tracer))
