"""`zgraph.materialize`: initialise a sharded model that was built on the meta device, one module at a time.

While `init` runs, modules have their original classes and plain unsharded parameters. A parameter has storage only
while its module is initialised, or while an operator uses it. Parameters that no longer fit into memory are reduced to
this rank's shard. So even an init that changes parameters of other modules works as on an unsharded model, with the
memory of one module: Hugging Face's GPT-2 rescales the projections of a block, for example.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zgraph.errors import ZgraphError
from zgraph.runtime.shared_rng import SharedRng, random_state, set_random_state
from zgraph.sharding.paged_parameters import WITH_NAN, PagedParameter, ParameterPager, find_pages, mesh_of
from zgraph.torch_compat.autograd import share_hooks
from zgraph.torch_compat.dynamo import is_compiled_wrapper, without_compile
from zgraph.torch_compat.memory import DispatchMode
from zgraph.torch_compat.modules import reset_method, tree_flatten
from zgraph.torch_compat.operators import OpOverload, written_tensors


def materialize(
    module: nn.Module, init: Callable[[nn.Module], object] | None = None, *, seed: int | None = None
) -> nn.Module:
    """Give a sharded model's meta parameters and buffers storage and the values of the unsharded model.

        with torch.device("meta"):
            model = Net()
        zgraph.shard(model, mesh)
        zgraph.materialize(model)

    The result has the same bits as `model.apply(init)` on the unsharded model followed by `zgraph.shard`. Later draws
    from torch's default generators are the same, too. Besides the shards, memory holds at most the parameters of the
    largest module, or the tensors that a single operator of `init` reads and writes.

    All ranks use rank 0's random numbers, and their own generators advance by the same number of draws. `init` must run
    the same operators on all ranks, because a parameter that is used again, after it was reduced to shards, is
    gathered. If nothing is on the meta device, the call changes nothing.

    Parameters remain the same objects, so the optimizer may have been created before this call. A parameter with weak
    references, such as those of a compiler that has seen the model, is replaced instead; an optimizer that still holds
    the replaced parameter is refused at the next forward.

    Args:
        module: a model sharded by `zgraph.shard`, compiled or not.
        init: called without gradient for each module as `module.apply(init)` would, children first. None: each
            module's `reset_parameters`, once. Values are then those of a model built without the meta device, if each
            module initialises itself at the end of its `__init__`. Exceptions: a tied parameter gets the value of its
            last module, and under torch 2.11 a convolution moved to channels_last draws its numbers in memory order.
            Modules are skipped if neither they nor their children have meta tensors. Parameters that had values keep
            them.
        seed: seed for torch's generators, as for torch.manual_seed; None: they continue from rank 0's state.

    Returns:
        `module`.

    Raises:
        ZgraphError: a parameter is not sharded, or `init` left a parameter or buffer without a value, or replaced it
            by a tensor that does not fit. After this error, or an error of `init`, the model and the random
            state are as before, and the call can be repeated.
    """
    root = without_compile(module)
    pages = find_pages(root)
    if not any(page.sharded.is_meta for page in pages):
        return module
    mesh = mesh_of(pages)
    before = random_state(mesh.device_type)
    pager = ParameterPager(pages)
    with _original_classes(root):
        try:
            pager.show()
            rng = SharedRng(mesh, seed)
            _initialise(root, init, pager, rng)
            pager.page_out_all()
            _check_values(root, init, pages, mesh)
        except BaseException:
            pager.hide()
            set_random_state(mesh.device_type, before)
            raise
        pager.settle()
    for page in pages:
        share_hooks(page.sharded, page.sharded)  # a tensor that moves to another device keeps its hooks, but runs none
    rng.settle()
    return module


# --- running init ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _original_classes(root: nn.Module) -> Generator[None]:
    """Restore inside the `with` the classes that modules had before `shard`, for an init that checks `type(module)`."""
    sharded = {part: type(part) for part in root.modules() if hasattr(type(part), "_zgraph_base")}
    try:
        for part, kind in sharded.items():
            part.__class__ = getattr(kind, "_zgraph_base")  # noqa: B009 (pyright does not know the attribute)
        yield
    finally:
        for part, kind in sharded.items():
            part.__class__ = kind


def _initialise(
    root: nn.Module, init: Callable[[nn.Module], object] | None, pager: ParameterPager, rng: SharedRng
) -> None:
    names = {id(part): name for name, part in root.named_modules()}
    on_meta = {id(part) for page in pager.pages if page.sharded.is_meta for part, _ in page.sites}
    wanted = {id(part) for part in root.modules() if any(id(child) in on_meta for child in part.modules())}
    done: set[int] = set()

    def visit(part: nn.Module) -> None:
        run = init
        if run is None:
            # Constructors initialise each module once, and a compiled module has the methods of the one it wraps.
            if id(part) in done or is_compiled_wrapper(part):
                return
            run = _reset
        done.add(id(part))
        if id(part) not in wanted:
            return
        pager.page_in(pager.of_module.get(id(part), []))
        try:
            with torch.no_grad(), _Watch(pager, rng):
                run(part)
            pager.adopt(part)
        except Exception as error:
            where = names.get(id(part)) or "the model itself"
            error.add_note(f"zgraph.materialize: while initialising {where} ({type(part).__name__}).")
            raise

    root.apply(visit)


def _reset(part: nn.Module) -> None:
    reset = reset_method(part)
    if reset is not None:
        reset()


class _Watch(DispatchMode):
    """Dispatch mode while `init` runs: gives each operator's tensors storage, and draws rank 0's random numbers.

    It also records the parameters and buffers to which operators write.
    """

    def __init__(self, pager: ParameterPager, rng: SharedRng) -> None:
        super().__init__()
        self.pager = pager
        self.rng = rng

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Views too, though they need no values: torch checks their bounds against the storage.
        self.pager.page_in(self.pager.of(tree_flatten((args, kwargs))[0]))
        for page in self.pager.of(written_tensors(func, args, kwargs)):
            page.written = page.changed = True
        return self.rng.run(func, args, kwargs)


# --- parameters without values --------------------------------------------------------------------------------------


def _check_values(
    root: nn.Module, init: Callable[[nn.Module], object] | None, pages: Sequence[PagedParameter], mesh: DeviceMesh
) -> None:
    """Check that every parameter and buffer has been given values, on all ranks.

    Raises:
        ZgraphError: a parameter or buffer has no values, or only some; the message names the first.
    """
    source = "reset_parameters" if init is None else "init"
    fresh = [page for page in pages if page.sharded.is_meta]
    unwritten = [page for page in fresh if not page.written]
    if unwritten:
        shown = ", ".join(_described(page) for page in unwritten[:4])
        more = f" and {len(unwritten) - 4} more" if len(unwritten) > 4 else ""
        advice = (
            "Give the module a reset_parameters that fills its parameters and buffers, or pass init=."
            if init is None
            else "init has to write every parameter and buffer; call module.reset_parameters() for modules that it "
            "does not initialise itself."
        )
        raise ZgraphError(f"zgraph.materialize: {source} left without a value: {shown}{more}. {advice}")
    holes = torch.tensor([_has_nan(page) for page in fresh], dtype=torch.int32, device=mesh.device_type)
    for axis in range(mesh.ndim):
        dist.all_reduce(holes, dist.ReduceOp.MAX, group=mesh.get_group(axis))
    for page, hole in zip(fresh, holes.tolist(), strict=True):
        if hole:
            raise ZgraphError(
                f"zgraph.materialize: {source} wrote {_described(page)} only in part, or computed it from a tensor "
                "without values (it has NaNs). Write all of it first, with torch.nn.init.zeros_ for instance."
            )
    for name, part in root.named_modules():
        for attribute, value in vars(part).items():
            if isinstance(value, Tensor) and value.is_meta:
                raise ZgraphError(
                    f"zgraph.materialize: {f'{name}.' if name else ''}{attribute} is a plain attribute on the meta "
                    f"device, neither parameter nor buffer; register it as a buffer, or let {source} assign it."
                )


def _described(page: PagedParameter) -> str:
    owner = page.sites[0][0]
    kind = "parameter" if page.is_parameter else "buffer"
    lacks = "" if reset_method(owner) is not None else ", which has no reset_parameters"
    return f"{page.name} ({kind} of {type(owner).__name__}{lacks})"


def _has_nan(page: PagedParameter) -> bool:
    """Return whether this rank's part of a parameter has a NaN.

    The sum is checked first, because it needs no memory; it may also be NaN because of infinities.
    """
    values = page.unsharded if page.shard is None else page.shard
    if not page.is_parameter or values.dtype not in WITH_NAN:
        return False
    return bool(values.sum().isnan()) and bool(values.isnan().any())
