"""Functions around AOTAutograd and `make_fx`: tracing, graph inputs, partitioning and calling conventions."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportUntypedBaseClass=false

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, cast

import torch
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
    """Create a Dynamo backend that traces forward and backward with AOTAutograd (torch 2.11 - 2.15).

    The public `functorch.compile.aot_module_simplified` is not used, because it leaves the generated backward visible
    to Dynamo.

    Args:
        compile_forward, compile_backward, compile_inference: functions that compile a traced graph.
        partition: function that splits the joint graph into forward and backward.
        decompose: whether to apply Inductor's decompositions; otherwise operators stay as in eager mode.
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
    """Let users call a compiled backward with `retain_graph=True` (torch 2.11 - 2.15).

    AOTAutograd lists saved tensors that the backward may overwrite, and refuses `retain_graph=True` if there are any.
    zgraph's backward overwrites no saved tensor, so this function empties the list. The option `donated_buffer` is no
    replacement: it would have to be off when the user calls backward.
    """
    from torch._guards import TracingContext

    metadata: Any = TracingContext.get().fw_metadata
    if metadata is not None and metadata.bw_donated_idxs:
        metadata.bw_donated_idxs.clear()


@dataclass(frozen=True, kw_only=True)
class Findings:
    """AOTAutograd's findings on a frame that writes to inputs, and returns new tensors and inputs.

    Inputs that share memory are merged before, if one is written to; indices count the merged inputs.

    Attributes:
        text: all findings; AOTAutograd calls frames with different texts in different ways.
        inputs_found: number of merged inputs.
        requires_grad: for each output of the frame, whether it requires gradients.
        inputs: for each output, the index of the input that it is; None for a new tensor.
        written: inputs that the frame writes to, by index, and whether only under `torch.no_grad`.
    """

    text: str
    inputs_found: int
    requires_grad: tuple[bool, ...]
    inputs: tuple[int | None, ...]
    written: tuple[tuple[int, bool], ...]


def findings_on_frame() -> Findings | None:
    """Return AOTAutograd's findings on the frame that is being compiled; available when its forward is compiled.

    None if the frame also changes the metadata or the gradient of an input, or returns views or other objects.
    torch 2.11 - 2.15: `TracingContext.fw_metadata`.
    """
    from torch._functorch._aot_autograd.schemas import OutputType
    from torch._guards import TracingContext
    from torch._subclasses.functional_tensor import FunctionalTensor

    found: Any = TracingContext.get().fw_metadata
    known = (OutputType.non_alias, OutputType.unsafe_view_alias, OutputType.is_input)
    if any(one.mutates_metadata for one in found.input_info) or found.tokens:
        return None
    if any(
        one.mutates_data and one.requires_grad and not one.mutations_under_no_grad_or_inference_mode
        for one in found.input_info
    ):
        return None
    if any(one.output_type not in known or one.raw_type not in (Tensor, FunctionalTensor) for one in found.output_info):
        return None
    if found.num_intermediate_bases or found.grad_enabled_mutation is not None or found.num_graphsafe_rng_states:
        return None
    requires_grad = tuple(bool(one.requires_grad) for one in found.output_info)
    tangents = [(tuple(one.shape), one.stride(), str(one.dtype)) for one in found.traced_tangents]
    written = tuple(
        (place, bool(one.mutations_under_no_grad_or_inference_mode))
        for place, one in enumerate(found.input_info)
        if one.mutates_data
    )
    inputs = tuple(one.base_idx if one.output_type is OutputType.is_input else None for one in found.output_info)
    text = f"{found.input_info} {requires_grad} {inputs} {tangents}"
    number = len(found.input_info)
    return Findings(text=text, inputs_found=number, requires_grad=requires_grad, inputs=inputs, written=written)


_CUSTOM = tuple((kind, when) for kind in ("joint", "post_grad") for when in ("pre", "post"))


def compile_settings() -> str | None:
    """Return the options of AOTAutograd and Inductor, and orders of preference, as text.

    None if an option is code of the user's, such as a pass. torch 2.11 - 2.15: `config.get_hash`, which leaves such
    options out.
    """
    from torch._functorch import config as of_aot
    from torch._inductor import config as of_inductor

    names = ("joint_custom_pass", "activation_memory_budget_solver", "activation_memory_budget_runtime_estimator")
    passes = ("pre_grad_custom_pass", *(f"{kind}_custom_{when}_pass" for kind, when in _CUSTOM))
    given = [getattr(of_aot, name, None) for name in names] + [getattr(of_inductor, name, None) for name in passes]
    if any(map(callable, given)):
        return None
    hashes = f"{of_aot.get_hash().hex()} {of_inductor.get_hash().hex()}"  # pyright: ignore[reportAttributeAccessIssue]
    return f"{hashes} {torch._C._get_sdp_priority_order()}"


def min_cut_partition(joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph into forward and backward with torch's min-cut partitioner, which obeys `meta["recompute"]`.

    torch 2.11 - 2.15: random operators that backward recomputes on a GPU draw from the device's generator only if
    Inductor's option `fallback_random` is on, so it is on here.
    """
    from functorch.compile import min_cut_rematerialization_partition
    from torch._inductor import config

    with config.patch(fallback_random=True):
        return min_cut_rematerialization_partition(joint, inputs, **kwargs)


def fusible_operators() -> frozenset[object]:
    """Return the operators that torch's partitioner expects to be fused (torch 2.11 - 2.15: `get_default_op_list`)."""
    from torch._functorch.partitioners import get_default_op_list

    return frozenset(get_default_op_list().fusible_ops)


def may_be_written(node: fx.Node) -> bool:
    """Return whether a saved value may be modified between forward and backward (torch 2.11 - 2.15: by metadata)."""
    return bool(node.meta.get("saved_tensor_with_no_vc_check", False))


def rng_state_operators() -> tuple[object, object]:
    """Return the operators `save` and `run` that replay random operators in backward (torch 2.11 - 2.15).

    `save(operator, ...)` returns the generator's state and the operator's result; `run(state, operator, ...)` returns
    the result for that state.
    """
    from torch._prims import rng_prims

    return rng_prims.run_and_save_rng_state, rng_prims.run_with_rng_state


def aot_input_index(node: fx.Node) -> int | None:
    """Return the index of the Dynamo graph's input that a joint graph's placeholder stands for.

    None for placeholders of other values, such as tangents (gradients of outputs). Placeholders of the parts of one
    DTensor have the same index. torch 2.11 - 2.15: read from `meta["desc"]`.
    """
    return _index_in(node.meta.get("desc"))


def _index_in(described: Any) -> int | None:
    while described is not None and hasattr(described, "base"):
        described = described.base
    index = getattr(described, "idx", None)
    return index if isinstance(index, int) else None


def gradient_indices(graph: fx.Graph) -> dict[int | None, int]:
    """Return the index of the output of a joint graph that is the gradient of an input, by the input's index.

    The indices of inputs are those of `aot_input_index`. torch 2.11 - 2.15: read from `meta["desc"]`.
    """
    described = next(iter(reversed(graph.nodes))).meta.get("desc", ())
    grads = {number: one.grad_of for number, one in enumerate(described) if hasattr(one, "grad_of")}
    return {_index_in(found): number for number, found in grads.items()}


def is_tangent(node: fx.Node) -> bool:
    """Return whether a joint graph's node is a tangent, the gradient of an output (torch 2.11 - 2.15: by its name)."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def belongs_to_backward(node: fx.Node) -> None:
    """Mark a new node of a joint graph as part of backward (torch 2.11 - 2.15: `meta["partitioner_tag"]`)."""
    node.meta["partitioner_tag"] = "is_backward"


def mutated_inputs(graph: fx.Graph) -> list[fx.Node]:
    """Return the placeholders of a joint graph whose inputs are modified by the call (torch 2.11 - 2.15).

    An input is modified if a node writes to it, or if AOTAutograd copies an output into it after the call, according to
    the output's `meta["desc"]`.
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
    """Mark a function that takes one list of inputs and empties it, for AOTAutograd.

    torch 2.11 - 2.15: `_boxed_call`.
    """
    run._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
    return run


class BoxedCodeGen(CodeGen):
    """Code generator for graphs that take one list of inputs and empty it: inputs are freed after their last use.

    torch 2.12 and newer have the same class under a private name; 2.11 has none.
    """

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, *, expanded_def: bool = False) -> str:
        names = [name.split(":")[0].split("=")[0].strip() for name in free_vars if name != "self"]
        lines = [f"def {getattr(self, '_func_name', 'forward')}(self, args_list){maybe_return_annotation}:"]
        if names:
            lines.append(f"    {', '.join(names)}, = args_list")
        lines.append("    args_list.clear()")
        return "\n".join(lines)


def trace(function: Callable[..., Any], fakes: Sequence[Any], mode: Any, *, decompose: bool) -> fx.GraphModule:
    """Trace a function, including backward passes that it runs, into one graph with `make_fx`.

    Args:
        function: function of fake tensors and numbers; returns a flat list of tensors.
        fakes: arguments of the function, created in `mode`.
        mode: fake mode from `step_mode`.
        decompose: whether to apply Inductor's decompositions.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    # torch 2.11 - 2.15: operators that read a tensor's value are traced as nodes whose result is a symbol.
    table: Mapping[Any, Any] = inductor_decompositions() if decompose else {}
    with mode:
        return make_fx(function, decomposition_table=dict(table), _error_on_data_dependent_ops=False)(*fakes)


def _graph() -> fx.Graph | None:
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode: Any = get_proxy_mode()
    return None if mode is None else mode.tracer.graph


def is_tracing() -> bool:
    """Return whether `make_fx` is tracing, as AOTAutograd does, too (torch 2.11 - 2.15: `get_proxy_mode`)."""
    return _graph() is not None


def without_graph() -> AbstractContextManager[Any]:
    """Keep the operations of a `with` block out of the traced graph.

    torch 2.11 - 2.15: `disable_proxy_modes_tracing`.
    """
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    return disable_proxy_modes_tracing()


def newest_node() -> fx.Node | None:
    """Return the last node of the graph that `make_fx` is tracing, or None (torch 2.11 - 2.15: `get_proxy_mode`)."""
    graph = _graph()
    return None if graph is None else next(iter(reversed(graph.nodes)), graph._root)


def nodes_after(node: fx.Node | None) -> Iterator[fx.Node]:
    """Yield the nodes of a graph after `node`."""
    while node is not None and (node := node.next).op != "root":
        yield node


def node_of_number(number: Any) -> fx.Node:
    """Return the node that computes a symbolic number in the graph being traced.

    torch 2.11 - 2.15: `get_proxy_slot`.
    """
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

    mode: Any = get_proxy_mode()
    return cast(Any, get_proxy_slot(number, mode.tracer)).force().node


def forget_constant(literal: Tensor) -> None:
    """Make a trace treat a literal tensor like any other tensor, not as a constant (torch 2.11 - 2.15).

    FakeTensorMode and `make_fx` compute operators on literals while tracing, and both make mistakes: FakeTensorMode
    reads a symbolic number among the arguments as NaN, and `make_fx` misses writes by foreach operators.
    """
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

    mode: Any = get_proxy_mode()
    if isinstance(literal, FakeTensor):
        literal.constant = None
        if mode is not None:
            cast(Any, get_proxy_slot(literal, mode.tracer)).constant = None


def let_stand_for(number: Any, other: Any) -> None:
    """Make `number` refer to the node of `other` in the graph being traced (torch 2.11 - 2.15: `set_proxy_slot`)."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, set_proxy_slot

    tracer: Any = cast(Any, get_proxy_mode()).tracer
    set_proxy_slot(number, tracer, get_proxy_slot(other, tracer))
