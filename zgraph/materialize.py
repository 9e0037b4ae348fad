"""`zgraph.materialize`: gives a sharded model that was built on the meta device its values, one module at a time.

While `init` runs, the model looks as it did before `shard`: its own classes, and plain whole parameters. Their storage
comes and goes like pages. It is there for the module that is being initialised, and for any other parameter from the
moment an operator touches it; whatever does not fit beside it is cut down to this rank's shard. An init that reaches
into another module (Hugging Face GPT-2 rescales the projections of a block, nn.MultiheadAttention zeroes a bias of its
child) therefore does what it does to a whole model, at the memory of one module.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from zgraph.errors import ZgraphError
from zgraph.ops import collective_error
from zgraph.torch_compat import (
    DispatchMode,
    OpOverload,
    is_compiled_wrapper,
    local_buffers,
    local_parameters,
    replace_parameter,
    reset_method,
    storage_key,
    tree_flatten,
    tree_unflatten,
    without_compile,
    written_tensors,
)
from zgraph.unit import state_of

# New pages of these hold NaN, so that what init leaves out is found instead of trained on.
_WITH_NAN = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
# In-place draws that do not read what they overwrite (aten names).
_OVERWRITING = frozenset(
    {"normal_", "uniform_", "random_", "bernoulli_", "exponential_", "geometric_", "cauchy_", "log_normal_"}
)

Site = tuple[nn.Module, str]


def materialize(
    module: nn.Module, init: Callable[[nn.Module], object] | None = None, *, seed: int | None = None
) -> nn.Module:
    """Give a sharded model's meta parameters and buffers storage and values, as if it had been initialised whole.

        with torch.device("meta"):
            model = Net()
        zgraph.shard(model, mesh)
        zgraph.materialize(model)

    The result, and what is drawn from torch's default generators afterwards, is bitwise that of `model.apply(init)` on
    the whole model, followed by `zgraph.shard`. Beside the shards only the parameters of one module are in memory:
    those of the largest at most, or what a single operator of `init` reads and writes.

    Every rank draws rank 0's numbers, whatever its own random state; its own state advances as if it had drawn from
    it. Collectives run where `init` touches a parameter a second time (a tied one, or one of another module), so
    `init` has to do the same on all ranks. With nothing on the meta device the call changes nothing.

    Parameters are the same objects afterwards, so an optimizer may be older than this call. Where that is impossible
    (something holds a weak reference, such as a compiler that met the model before) the parameter is replaced, and an
    optimizer that holds the old one is refused at the next forward.

    Args:
        module: sharded by `zgraph.shard`; or what torch.compile made of it.
        init: called without gradient for each module as `module.apply(init)` would, children first. None: each
            module's `reset_parameters`, once. That is what the constructor did where each module initialises itself at
            the end of its `__init__`; a tied parameter takes the value of its last module.
            Modules that have, with all their children, nothing on the meta device are left out, and parameters that
            had values keep them.
        seed: of torch's generators, as torch.manual_seed sets it; None: they continue from rank 0's state.

    Returns:
        `module`.

    Raises:
        ZgraphError: a parameter is not sharded, `init` left one or a buffer without a value, or replaced it by
            something that does not fit. As after an exception of `init` itself, everything that was on the meta device
            still is, the random state is as it was, and the call can be repeated.
    """
    root = without_compile(module)
    pages = _find_pages(root)
    if not any(page.resting.is_meta for page in pages):
        return module
    mesh = _mesh_of(pages)
    before = _random_state(mesh.device_type)
    memory = _Memory(pages)
    with _whole_classes(root):
        try:
            memory.show()
            draws = _Draws(mesh, seed)
            _initialise(root, init, memory, draws)
            memory.page_out_all()
            _check_values(root, init, pages, mesh)
        except BaseException:
            memory.hide()
            _set_random_state(mesh.device_type, before)
            raise
        memory.settle()
    draws.settle()
    return module


# --- pages ----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Page:
    """One parameter or buffer, and the whole tensor that stands for it while `init` runs.

    Attributes:
        name: qualified, of its first place.
        sites: every (module, attribute) that holds it.
        resting: what the module held before: a DTensor, or a meta buffer.
        whole: [*shape] plain tensor; its storage is empty while the page is out.
        shown: what the module holds meanwhile: a parameter or buffer over the storage of `whole`.
        whole_bytes: of the full storage.
        cut: some rank keeps less than the whole.
        shard: this rank's part, once there are values that are not in `whole`.
        written: an operator has written to it.
        changed: since it was last paged out.
    """

    name: str
    sites: list[Site]
    resting: Tensor
    whole: Tensor
    shown: Tensor
    whole_bytes: int
    cut: bool
    shard: Tensor | None = None
    written: bool = False
    changed: bool = False

    @property
    def is_parameter(self) -> bool:
        return isinstance(self.resting, DTensor)

    @property
    def comes_and_goes(self) -> bool:
        """Whether it has a smaller form: a shard, or the values that it had before and will keep."""
        return self.cut or not self.resting.is_meta

    @property
    def is_in(self) -> bool:
        return self.whole.untyped_storage().nbytes() == self.whole_bytes


def _find_pages(root: nn.Module) -> list[_Page]:
    """Sharded parameters, and buffers on the meta device, in the order of `named_modules`.

    Raises:
        ZgraphError: a meta parameter is not sharded.
    """
    pages: dict[int, _Page] = {}
    for prefix, part in root.named_modules():
        held: dict[str, Tensor | None] = {**local_parameters(part), **local_buffers(part)}
        for attribute, tensor in held.items():
            if tensor is None or id(tensor) in pages:
                if tensor is not None:
                    pages[id(tensor)].sites.append((part, attribute))
                continue
            name = f"{prefix}.{attribute}" if prefix else attribute
            if not isinstance(tensor, DTensor) and tensor.is_meta and attribute in local_parameters(part):
                raise ZgraphError(
                    f"zgraph.materialize: {name} is on the meta device and not sharded; call zgraph.shard(model) first."
                )
            if isinstance(tensor, DTensor) or tensor.is_meta:
                pages[id(tensor)] = _Page(name, [(part, attribute)], tensor, tensor, tensor, 0, False)
    mesh = _mesh_of(pages.values()) if any(page.resting.is_meta for page in pages.values()) else None
    if mesh is not None:
        for page in pages.values():
            _lay_out(page, mesh.device_type)
    return list(pages.values())


def _mesh_of(pages: Iterable[_Page]) -> DeviceMesh:
    for page in pages:
        if isinstance(page.resting, DTensor):
            return page.resting.device_mesh
    raise ZgraphError("zgraph.materialize: the model has no sharded parameter; call zgraph.shard(model) first.")


def _lay_out(page: _Page, device_type: str) -> None:
    """Make the whole tensor, without its storage."""
    resting = page.resting
    page.whole = torch.empty_strided(resting.shape, resting.stride(), dtype=resting.dtype, device=device_type)
    page.whole_bytes = page.whole.untyped_storage().nbytes()
    page.whole.untyped_storage().resize_(0)
    page.shown = page.whole.detach()
    if isinstance(resting, DTensor):
        page.shown = nn.Parameter(page.whole, requires_grad=resting.requires_grad)
        placements = enumerate(resting.placements)
        page.cut = any(not kind.is_replicate() and resting.device_mesh.size(axis) > 1 for axis, kind in placements)
        if not page.resting.is_meta:
            with torch.no_grad():
                page.shard = resting.to_local()
            page.written = True
    for mark, value in vars(resting).items():
        if mark != "_is_param":  # torch's own, and untrue of a plain parameter
            setattr(page.shown, mark, value)


class _Memory:
    """All pages of a model, and which are in: never more than the largest module needs, or one operator."""

    def __init__(self, pages: Sequence[_Page]) -> None:
        self.pages = pages
        self.by_storage = {storage_key(page.whole): page for page in pages}
        self.of_module: dict[int, list[_Page]] = {}
        for page in pages:
            for part, _ in page.sites:
                owned = self.of_module.setdefault(id(part), [])
                if page not in owned:
                    owned.append(page)
        self.budget_bytes = max(
            (sum(page.whole_bytes for page in owned if page.comes_and_goes) for owned in self.of_module.values()),
            default=0,
        )
        self.in_memory: dict[_Page, None] = {}  # the ones that come and go, least recently used first

    def show(self) -> None:
        """Put the whole tensors where the model reads its parameters and buffers."""
        for page in self.pages:
            for part, attribute in page.sites:
                _hold(page, part, attribute, page.shown)

    def hide(self) -> None:
        """Put back what was there, as if nothing had been initialised."""
        for page in self.pages:
            for part, attribute in page.sites:
                _hold(page, part, attribute, page.resting)

    def of(self, tensors: Iterable[object]) -> list[_Page]:
        """The pages that these tensors are, or are views of."""
        keys = dict.fromkeys(storage_key(tensor) for tensor in tensors if isinstance(tensor, Tensor))
        return [self.by_storage[key] for key in keys if key in self.by_storage]

    def page_in(self, needed: Sequence[_Page]) -> None:
        """Give all of these storage and their values; the least recently used others make room."""
        missing_bytes = sum(page.whole_bytes for page in needed if page.comes_and_goes and not page.is_in)
        for page in [page for page in self.in_memory if page not in needed]:
            if sum(page.whole_bytes for page in self.in_memory) + missing_bytes <= self.budget_bytes:
                break
            self.page_out(page)
        for page in needed:
            if page.comes_and_goes:
                self.in_memory.pop(page, None)
                self.in_memory[page] = None
            if page.is_in:
                continue
            page.whole.untyped_storage().resize_(page.whole_bytes)
            if page.shard is not None:
                _gather_into(page)
            elif page.whole.dtype in _WITH_NAN:
                page.whole.fill_(torch.nan)
            else:
                page.whole.zero_()

    def page_out(self, page: _Page) -> None:
        """Keep this rank's part and give the rest back."""
        self.in_memory.pop(page, None)
        if page.changed and page.resting.is_meta:
            page.shard = None  # before the new one, not after
            page.shard = _own_part(page)
        page.changed = False
        page.whole.untyped_storage().resize_(0)

    def page_out_all(self) -> None:
        empty = [page for page in self.pages if page.resting.is_meta and page.whole.numel() == 0]
        for page in empty:  # no operator writes what has no elements
            page.written = page.changed = True
        for page in [*self.in_memory, *(page for page in empty if page.cut)]:
            self.page_out(page)

    def adopt(self, root: nn.Module) -> None:
        """Take over what `init` assigned instead of writing in place, here or in a child.

        Raises:
            ZgraphError: it cannot stand for the parameter.
        """
        for part in root.modules():
            for page in self.of_module.get(id(part), ()):
                for site, attribute in page.sites:
                    if site is not part:
                        continue
                    if page.is_parameter:
                        self._adopt_parameter(page, part, attribute)
                    else:
                        self._adopt_buffer(page, part, attribute)

    def _adopt_parameter(self, page: _Page, part: nn.Module, attribute: str) -> None:
        found = local_parameters(part).get(attribute)
        if found is not None and found is page.shown and storage_key(found) == storage_key(page.whole):
            return
        if (
            found is None
            or (found is not page.shown and len(page.sites) > 1)
            or (found.shape, found.dtype, found.is_meta) != (page.whole.shape, page.whole.dtype, False)
        ):
            now = "nothing" if found is None else f"{list(found.shape)} {found.dtype} on {found.device.type}"
            raise ZgraphError(
                f"zgraph.materialize: init has replaced {page.name} ({list(page.whole.shape)} {page.whole.dtype}, read "
                f"in {len(page.sites)} places) by {now}; write into it in place, as torch.nn.init does."
            )
        self.page_in([page])
        page.whole.copy_(found.detach())
        page.written = page.changed = True
        page.shown.data = page.whole
        page.shown.requires_grad_(found.requires_grad)
        _hold(page, part, attribute, page.shown)

    def _adopt_buffer(self, page: _Page, part: nn.Module, attribute: str) -> None:
        found = local_buffers(part).get(attribute)
        if found is not None and found is page.shown and storage_key(found) == storage_key(page.whole):
            return
        if found is not None and found.is_meta:
            raise ZgraphError(
                f"zgraph.materialize: init has replaced the buffer {page.name} by another one on the meta device; "
                "give it a real value."
            )
        page.written = True
        if found is not None and found.device.type != page.whole.device.type:
            local_buffers(part)[attribute] = found.to(page.whole.device)

    def settle(self) -> None:
        """The parameters become DTensors again, now with storage; buffers are in place already."""
        for page in self.pages:
            if not isinstance(page.resting, DTensor):
                continue
            for part, attribute in page.sites:
                _hold(page, part, attribute, page.resting)
            if page.resting.is_meta:
                _fill_resting(page, page.resting)


def _hold(page: _Page, part: nn.Module, attribute: str, value: Tensor) -> None:
    if page.is_parameter:
        replace_parameter(part, attribute, value)
    else:
        local_buffers(part)[attribute] = value


def _own_part(page: _Page) -> Tensor:
    """This rank's part of the whole, in storage of its own. All ranks hold the same whole, so nothing is sent."""
    assert isinstance(page.resting, DTensor)
    placed = distribute_tensor(page.whole, page.resting.device_mesh, page.resting.placements, src_data_rank=None)
    part = placed.to_local()
    shared = storage_key(part) == storage_key(page.whole)
    return part.clone(memory_format=torch.contiguous_format) if shared else part


def _gather_into(page: _Page) -> None:
    """Fill the whole from the ranks' parts; on the usual placement without a second buffer of its size."""
    assert isinstance(page.resting, DTensor) and page.shard is not None
    mesh, placements = page.resting.device_mesh, page.resting.placements
    axes = [axis for axis, kind in enumerate(placements) if not kind.is_replicate() and mesh.size(axis) > 1]
    if not axes:
        page.whole.copy_(page.shard)
        return
    if len(axes) > 1 or type(placements[axes[0]]) is not Shard or not placements[axes[0]].is_shard(0):
        page.whole.copy_(_as_dtensor(page, page.shard).full_tensor())
        return
    group = mesh.get_group(axes[0])
    try:
        # Shard(0) splits as torch.chunk does: the last ranks may have less, or nothing.
        for rank, rows in enumerate(page.whole.chunk(mesh.size(axes[0]))):
            if rank == mesh.get_local_rank(axes[0]):
                rows.copy_(page.shard)  # sent from here: gloo may hold what it has sent a moment longer than it waits
            piece = rows.contiguous()
            dist.broadcast(piece, src=dist.get_global_rank(group, rank), group=group)
            if piece is not rows:
                rows.copy_(piece)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise collective_error("broadcast", [page.name], group.group_name, error) from error


def _as_dtensor(page: _Page, shard: Tensor) -> DTensor:
    resting = page.resting
    assert isinstance(resting, DTensor)
    return DTensor.from_local(
        shard, resting.device_mesh, resting.placements, run_check=False, shape=resting.shape, stride=resting.stride()
    )


def _fill_resting(page: _Page, resting: DTensor) -> None:
    """Give the parameter its shard: the same object where torch allows it, else a new one in its places."""
    shard = page.whole if page.shard is None else page.shard
    laid_out = cast(
        DTensor, resting.detach()
    ).to_local()  # on meta, yet laid out as shard() would have done with values
    if shard.stride() != laid_out.stride():
        shard = torch.empty_like(laid_out, device=shard.device).copy_(shard)
        page.whole.untyped_storage().resize_(0)
    filled = nn.Parameter(_as_dtensor(page, shard), requires_grad=page.shown.requires_grad)
    for mark, value in vars(page.shown).items():
        setattr(filled, mark, value)
    try:
        torch.utils.swap_tensors(resting, filled)
    except RuntimeError:  # something holds a weak reference to it, or has it in an autograd graph
        for part, attribute in page.sites:
            state = state_of(part)
            sites = state.by_attribute[attribute].sites if state and attribute in state.by_attribute else page.sites
            for site, name in sites:
                replace_parameter(site, name, filled)
            if state is not None:
                state.scope.replaced.append((page.name, weakref.ref(cast(nn.Parameter, resting))))


# --- running init ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _whole_classes(root: nn.Module) -> Generator[None]:
    """Meanwhile the modules have the classes that they had before `shard`: init may ask for `type(module)`."""
    sharded = {part: type(part) for part in root.modules() if hasattr(type(part), "_zgraph_base")}
    try:
        for part, kind in sharded.items():
            part.__class__ = getattr(kind, "_zgraph_base")  # noqa: B009 (the type does not have it for pyright)
        yield
    finally:
        for part, kind in sharded.items():
            part.__class__ = kind


def _initialise(root: nn.Module, init: Callable[[nn.Module], object] | None, memory: _Memory, draws: _Draws) -> None:
    names = {id(part): name for name, part in root.named_modules()}
    on_meta = {id(part) for page in memory.pages if page.resting.is_meta for part, _ in page.sites}
    wanted = {id(part) for part in root.modules() if any(id(child) in on_meta for child in part.modules())}
    done: set[int] = set()

    def visit(part: nn.Module) -> None:
        run = init
        if run is None:
            # The constructor initialised each module once, and a compiled module has the methods of the one it wraps.
            if id(part) in done or is_compiled_wrapper(part):
                return
            run = _reset
        done.add(id(part))
        if id(part) not in wanted:
            return
        memory.page_in(memory.of_module.get(id(part), []))
        try:
            with torch.no_grad(), _Watch(memory, draws):
                run(part)
            memory.adopt(part)
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
    """Pages in what an operator needs, notes what it writes, and gives it the shared random numbers."""

    def __init__(self, memory: _Memory, draws: _Draws) -> None:
        super().__init__()
        self.memory = memory
        self.draws = draws

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Views too, though they need no values: torch checks their bounds against the storage.
        self.memory.page_in(self.memory.of(tree_flatten((args, kwargs))[0]))
        for page in self.memory.of(written_tensors(func, args, kwargs)):
            page.written = page.changed = True
        return self.draws.run(func, args, kwargs)


class _Draws:
    """Rank 0's random numbers for everyone, while this rank's own state advances as if it had drawn them itself."""

    def __init__(self, mesh: DeviceMesh, seed: int | None) -> None:
        self.device_type = mesh.device_type
        own = _random_state(self.device_type)
        if seed is not None:
            torch.manual_seed(seed)
        shared = tuple(_from_first_rank(state, mesh) for state in _random_state(self.device_type))
        _set_random_state(self.device_type, shared)
        same = all(torch.equal(ours, theirs) for ours, theirs in zip(own, shared, strict=True))
        self.own = None if same or seed is not None else own

    def run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the operator; one that draws is called with this rank's own state first, and the result thrown away."""
        if (
            self.own is not None
            and torch.Tag.nondeterministic_seeded in func.tags
            and kwargs.get("generator") is None  # else it draws from what the caller has seeded
        ):
            shared = _random_state(self.device_type)
            _set_random_state(self.device_type, self.own)
            if func.overloadpacket.__name__ in _OVERWRITING:
                func(*args, **kwargs)
            else:
                leaves, spec = tree_flatten((args, kwargs))
                copies = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
                copied_args, copied_kwargs = tree_unflatten(copies, spec)
                func(*copied_args, **copied_kwargs)
            self.own = _random_state(self.device_type)
            _set_random_state(self.device_type, shared)
        return func(*args, **kwargs)

    def settle(self) -> None:
        if self.own is not None:
            _set_random_state(self.device_type, self.own)


def _random_state(device_type: str) -> tuple[Tensor, ...]:
    """State of the default generators: the CPU's, and the current accelerator's where the model is on one."""
    if device_type == "cpu":
        return (torch.get_rng_state(),)
    return torch.get_rng_state(), torch.get_device_module(device_type).get_rng_state()


def _set_random_state(device_type: str, states: tuple[Tensor, ...]) -> None:
    torch.set_rng_state(states[0])
    if device_type != "cpu":
        torch.get_device_module(device_type).set_rng_state(states[1])


def _from_first_rank(state: Tensor, mesh: DeviceMesh) -> Tensor:
    """The first rank's state on all ranks of the mesh, axis after axis."""
    sent = state.to(mesh.device_type)
    for axis in range(mesh.ndim):
        group = mesh.get_group(axis)
        dist.broadcast(sent, src=dist.get_global_rank(group, 0), group=group)
    return sent.to(state.device)


# --- what init left out ---------------------------------------------------------------------------------------------


def _check_values(
    root: nn.Module, init: Callable[[nn.Module], object] | None, pages: Sequence[_Page], mesh: DeviceMesh
) -> None:
    """Refuse what has no value, or only in part; the same on all ranks.

    Raises:
        ZgraphError: names the first of them.
    """
    source = "reset_parameters" if init is None else "init"
    fresh = [page for page in pages if page.resting.is_meta]
    unwritten = [page for page in fresh if not page.written]
    if unwritten:
        shown = ", ".join(_described(page) for page in unwritten[:4])
        more = f" and {len(unwritten) - 4} more" if len(unwritten) > 4 else ""
        advice = (
            "Give the module a reset_parameters that fills its parameters and buffers, or pass init=."
            if init is None
            else "init has to write every parameter and buffer; call module.reset_parameters() for the modules that it "
            "has nothing of its own for."
        )
        raise ZgraphError(f"zgraph.materialize: {source} left without a value: {shown}{more}. {advice}")
    holes = torch.tensor([_has_nan(page) for page in fresh], dtype=torch.int32, device=mesh.device_type)
    for axis in range(mesh.ndim):
        dist.all_reduce(holes, dist.ReduceOp.MAX, group=mesh.get_group(axis))
    for page, hole in zip(fresh, holes.tolist(), strict=True):
        if hole:
            raise ZgraphError(
                f"zgraph.materialize: {source} wrote {_described(page)} only in part, or computed it from what had no "
                "value yet (there are NaNs in it). Write all of it first, with torch.nn.init.zeros_ for instance."
            )
    for name, part in root.named_modules():
        for attribute, value in vars(part).items():
            if isinstance(value, Tensor) and value.is_meta:
                raise ZgraphError(
                    f"zgraph.materialize: {f'{name}.' if name else ''}{attribute} is a plain attribute on the meta "
                    f"device, neither parameter nor buffer; register it as a buffer, or let {source} assign it."
                )


def _described(page: _Page) -> str:
    owner = page.sites[0][0]
    kind = "parameter" if page.is_parameter else "buffer"
    lacks = "" if reset_method(owner) is not None else ", which has no reset_parameters"
    return f"{page.name} ({kind} of {type(owner).__name__}{lacks})"


def _has_nan(page: _Page) -> bool:
    """Of this rank's part. The sum needs no memory; it is NaN for infinities of both signs too."""
    values = page.whole if page.shard is None else page.shard
    if not page.is_parameter or values.dtype not in _WITH_NAN:
        return False
    return bool(values.sum().isnan()) and bool(values.isnan().any())
