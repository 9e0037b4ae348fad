"""Paged unsharded tensors: each has storage while an initialisation uses it; otherwise ranks store only shards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from zgraph.errors import ZgraphError
from zgraph.runtime.collective_error import collective_error
from zgraph.sharding.model.codes import Codes
from zgraph.sharding.scope import state_of
from zgraph.tiers.placement.resting import Resting
from zgraph.torch_compat.dtensor import dtensor_like
from zgraph.torch_compat.memory import storage_key
from zgraph.torch_compat.modules import local_buffers, local_parameters, replace_parameter

# Dtypes whose new pages are filled with NaN, so that elements left uninitialised are detected rather than trained on.
WITH_NAN = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})

Site = tuple[nn.Module, str]


@dataclass(eq=False)
class PagedParameter:
    """A parameter or buffer, with the unsharded tensor that replaces it while `init` runs.

    Attributes:
        name: qualified name of the first site.
        sites: every (module, attribute) that holds the tensor.
        sharded: the tensor that `unsharded` replaces: a DTensor, or a buffer on the meta device.
        unsharded: plain tensor of the whole shape; without storage while it is paged out.
        shown: the parameter or buffer that the module holds while `init` runs, over the storage of `unsharded`.
        unsharded_bytes: bytes of the storage of `unsharded` while it is paged in.
        is_split: whether some rank stores less than the whole tensor, or offloads it.
        shard: this rank's part, as of the last page-out; None: there are no values yet.
        written: whether an operator has written to the tensor.
        changed: whether an operator has written to the tensor since it was last paged out.
    """

    name: str
    sites: list[Site]
    sharded: Tensor
    unsharded: Tensor
    shown: Tensor
    unsharded_bytes: int
    is_split: bool
    shard: Tensor | None = None
    written: bool = False
    changed: bool = False

    @property
    def is_parameter(self) -> bool:
        return isinstance(self.sharded, DTensor)

    @property
    def is_paged(self) -> bool:
        """Whether the tensor can be paged out: a rank keeps only a shard of it, or `sharded` already has values."""
        return self.is_split or not self.sharded.is_meta

    @property
    def is_in(self) -> bool:
        return self.unsharded.untyped_storage().nbytes() == self.unsharded_bytes


def find_pages(root: nn.Module) -> list[PagedParameter]:
    """Return a page for each sharded parameter and each buffer on the meta device, in the order of `named_modules`.

    Raises:
        ZgraphError: a parameter on the meta device is not sharded.
    """
    pages: dict[int, PagedParameter] = {}
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
                pages[id(tensor)] = PagedParameter(name, [(part, attribute)], tensor, tensor, tensor, 0, False)
    mesh = mesh_of(pages.values()) if any(page.sharded.is_meta for page in pages.values()) else None
    if mesh is not None:
        for page in pages.values():
            _lay_out(page, mesh.device_type)
    return list(pages.values())


def mesh_of(pages: Iterable[PagedParameter]) -> DeviceMesh:
    for page in pages:
        if isinstance(page.sharded, DTensor):
            return page.sharded.device_mesh
    raise ZgraphError("zgraph.materialize: the model has no sharded parameter; call zgraph.shard(model) first.")


def _lay_out(page: PagedParameter, device_type: str) -> None:
    """Create the unsharded tensor of a page, without storage."""
    sharded = page.sharded
    page.unsharded = torch.empty_strided(sharded.shape, sharded.stride(), dtype=sharded.dtype, device=device_type)
    page.unsharded_bytes = page.unsharded.untyped_storage().nbytes()
    page.unsharded.untyped_storage().resize_(0)
    page.shown = page.unsharded.detach()
    if isinstance(sharded, DTensor):
        page.shown = nn.Parameter(page.unsharded, requires_grad=sharded.requires_grad)
        placements = enumerate(sharded.placements)
        page.is_split = any(not kind.is_replicate() and sharded.device_mesh.size(axis) > 1 for axis, kind in placements)
        page.is_split = page.is_split or (_resting(page) is not None and sharded.ndim > 0)
        if not page.sharded.is_meta:
            with torch.no_grad():
                page.shard = sharded.to_local()
            page.written = True
    for mark, value in vars(sharded).items():
        if mark != "_is_param":  # set by torch, and wrong for a plain parameter
            setattr(page.shown, mark, value)


class ParameterPager:
    """All pages of a model. Memory holds at most the pages of the largest module, or those that one operator uses."""

    def __init__(self, pages: Sequence[PagedParameter]) -> None:
        self.pages = pages
        self.by_storage = {storage_key(page.unsharded): page for page in pages}
        self.of_module: dict[int, list[PagedParameter]] = {}
        for page in pages:
            for part, _ in page.sites:
                owned = self.of_module.setdefault(id(part), [])
                if page not in owned:
                    owned.append(page)
        self.budget_bytes = max(
            (sum(page.unsharded_bytes for page in owned if page.is_paged) for owned in self.of_module.values()),
            default=0,
        )
        self.in_memory: dict[PagedParameter, None] = {}  # pages that can be paged out, least recently used first

    def show(self) -> None:
        """Replace the model's parameters and buffers by their unsharded tensors."""
        for page in self.pages:
            for part, attribute in page.sites:
                _hold(page, part, attribute, page.shown)

    def hide(self) -> None:
        """Put back the tensors that the model had before, and discard what `init` has written."""
        for page in self.pages:
            for part, attribute in page.sites:
                _hold(page, part, attribute, page.sharded)

    def of(self, tensors: Iterable[object]) -> list[PagedParameter]:
        """Return the pages whose storage any of `tensors` uses."""
        keys = dict.fromkeys(storage_key(tensor) for tensor in tensors if isinstance(tensor, Tensor))
        return [self.by_storage[key] for key in keys if key in self.by_storage]

    def page_in(self, needed: Sequence[PagedParameter]) -> None:
        """Allocate these pages and fill them with values. To make room, page out the least recently used others."""
        missing_bytes = sum(page.unsharded_bytes for page in needed if page.is_paged and not page.is_in)
        for page in [page for page in self.in_memory if page not in needed]:
            if sum(page.unsharded_bytes for page in self.in_memory) + missing_bytes <= self.budget_bytes:
                break
            self.page_out(page)
        for page in needed:
            if page.is_paged:
                self.in_memory.pop(page, None)
                self.in_memory[page] = None
            if page.is_in:
                continue
            page.unsharded.untyped_storage().resize_(page.unsharded_bytes)
            if page.shard is not None:
                _gather_into(page)
            elif page.unsharded.dtype in WITH_NAN:
                page.unsharded.fill_(torch.nan)
            else:
                page.unsharded.zero_()

    def page_out(self, page: PagedParameter) -> None:
        """Free the storage of a page, and keep only this rank's part."""
        self.in_memory.pop(page, None)
        if page.changed and page.sharded.is_meta:
            page.shard = None  # freed before the new one is made
            page.shard = _at_rest(page, _own_part(page))
        page.changed = False
        page.unsharded.untyped_storage().resize_(0)

    def page_out_all(self) -> None:
        empty = [page for page in self.pages if page.sharded.is_meta and page.unsharded.numel() == 0]
        for page in empty:  # no operator writes to a tensor without elements
            page.written = page.changed = True
        for page in [*self.in_memory, *(page for page in empty if page.is_split)]:
            self.page_out(page)

    def adopt(self, root: nn.Module) -> None:
        """Copy to the pages the tensors by which `init` has replaced parameters or buffers instead of writing in place.

        Args:
            root: module in which to look for assigned tensors, including its children.

        Raises:
            ZgraphError: an assigned tensor has another shape or dtype than its parameter, or no values.
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

    def _adopt_parameter(self, page: PagedParameter, part: nn.Module, attribute: str) -> None:
        found = local_parameters(part).get(attribute)
        if found is not None and found is page.shown and storage_key(found) == storage_key(page.unsharded):
            return
        if (
            found is None
            or (found is not page.shown and len(page.sites) > 1)
            or (found.shape, found.dtype, found.is_meta) != (page.unsharded.shape, page.unsharded.dtype, False)
        ):
            now = "nothing" if found is None else f"{list(found.shape)} {found.dtype} on {found.device.type}"
            raise ZgraphError(
                f"zgraph.materialize: init has replaced {page.name} ({list(page.unsharded.shape)} "
                f"{page.unsharded.dtype}, read in {len(page.sites)} places) by {now}; write into it in place, as "
                "torch.nn.init does."
            )
        self.page_in([page])
        page.unsharded.copy_(found.detach())
        page.written = page.changed = True
        page.shown.data = page.unsharded
        page.shown.requires_grad_(found.requires_grad)
        _hold(page, part, attribute, page.shown)

    def _adopt_buffer(self, page: PagedParameter, part: nn.Module, attribute: str) -> None:
        found = local_buffers(part).get(attribute)
        if found is not None and found is page.shown and storage_key(found) == storage_key(page.unsharded):
            return
        if found is not None and found.is_meta:
            raise ZgraphError(
                f"zgraph.materialize: init has replaced the buffer {page.name} by another one on the meta device; "
                "give it a real value."
            )
        page.written = True
        if found is not None and found.device.type != page.unsharded.device.type:
            local_buffers(part)[attribute] = found.to(page.unsharded.device)

    def settle(self) -> None:
        """Replace the unsharded parameters by their DTensors, which now have values. Buffers stay as they are."""
        for page in self.pages:
            if not isinstance(page.sharded, DTensor):
                continue
            for part, attribute in page.sites:
                _hold(page, part, attribute, page.sharded)
            if page.sharded.is_meta:
                _fill_sharded(page, page.sharded)


def _hold(page: PagedParameter, part: nn.Module, attribute: str, value: Tensor) -> None:
    if page.is_parameter:
        replace_parameter(part, attribute, value)
    else:
        local_buffers(part)[attribute] = value


def _own_part(page: PagedParameter) -> Tensor:
    """Copy this rank's part of a page into new storage. Nothing is sent, because all ranks have the whole tensor."""
    assert isinstance(page.sharded, DTensor)
    placed = distribute_tensor(page.unsharded, page.sharded.device_mesh, page.sharded.placements, src_data_rank=None)
    part = placed.to_local()
    shared = storage_key(part) == storage_key(page.unsharded)
    return part.clone(memory_format=torch.contiguous_format) if shared else part


def _resting(page: PagedParameter) -> Resting | None:
    """Return the memory of the model's offloaded tensors if the parameter is offloaded; else None."""
    state = state_of(page.sites[0][0])
    resting = None if state is None else state.scope.resting
    return resting if resting is not None and resting.options.params is not None else None


def _codes(page: PagedParameter) -> Codes | None:
    """Return how the parameter's weight is encoded in low-bit integers; None if it is stored unencoded."""
    site, attribute = page.sites[0]
    state = state_of(site)
    param = None if state is None else state.by_attribute.get(attribute)
    return None if param is None else param.spec.codes


def _at_rest(page: PagedParameter, part: Tensor) -> Tensor:
    """Move this rank's part to the host or disk if the parameter is offloaded, and return it."""
    resting = _resting(page)
    return part if resting is None else resting.place_shard(part, page.name)


def _gather_into(page: PagedParameter) -> None:
    """Gather all ranks' parts into the unsharded tensor; with `Shard(0)`, without a second buffer of that size."""
    assert isinstance(page.sharded, DTensor) and page.shard is not None
    mesh, placements = page.sharded.device_mesh, page.sharded.placements
    axes = [axis for axis, kind in enumerate(placements) if not kind.is_replicate() and mesh.size(axis) > 1]
    if not axes:
        page.unsharded.copy_(page.shard)
        return
    if len(axes) > 1 or type(placements[axes[0]]) is not Shard or not placements[axes[0]].is_shard(0):
        page.unsharded.copy_(_as_dtensor(page, page.shard).full_tensor())
        return
    group = mesh.get_group(axes[0])
    try:
        # Shard(0) splits like torch.chunk: the last ranks may have fewer rows, or none.
        for rank, rows in enumerate(page.unsharded.chunk(mesh.size(axes[0]))):
            if rank == mesh.get_local_rank(axes[0]):
                rows.copy_(page.shard)  # send a copy: gloo may hold its send buffer briefly after the wait has ended
            piece = rows.contiguous()
            dist.broadcast(piece, src=dist.get_global_rank(group, rank), group=group)
            if piece is not rows:
                rows.copy_(piece)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise collective_error("broadcast", [page.name], group.group_name, error) from error


def _as_dtensor(page: PagedParameter, shard: Tensor) -> DTensor:
    sharded = page.sharded
    assert isinstance(sharded, DTensor)
    return DTensor.from_local(
        shard, sharded.device_mesh, sharded.placements, run_check=False, shape=sharded.shape, stride=sharded.stride()
    )


def _fill_sharded(page: PagedParameter, sharded: DTensor) -> None:
    """Fill the DTensor parameter with its shard. If torch cannot swap the tensor in place, replace the parameter."""
    shard = page.unsharded if page.shard is None else page.shard
    laid_out = cast(DTensor, sharded.detach()).to_local()  # on meta, with the layout that shard() gives values
    if shard.stride() != laid_out.stride():
        shard = torch.empty_like(laid_out, device=shard.device).copy_(shard)
        page.unsharded.untyped_storage().resize_(0)
    codes = _codes(page)
    if codes is None:
        values = dtensor_like(_at_rest(page, shard), sharded)
    else:
        coded = codes.encoded(_as_dtensor(page, shard))
        values = dtensor_like(_at_rest(page, coded.to_local()), coded)
    filled = nn.Parameter(values, requires_grad=page.shown.requires_grad and codes is None)
    vars(filled).pop("viewed", None)  # it is not a view of another parameter
    for mark, value in vars(page.shown).items():
        setattr(filled, mark, value)
    try:
        torch.utils.swap_tensors(sharded, filled)
    except RuntimeError:  # a weak reference or an autograd graph holds it
        for part, attribute in page.sites:
            state = state_of(part)
            sites = state.by_attribute[attribute].sites if state and attribute in state.by_attribute else page.sites
            for site, name in sites:
                replace_parameter(site, name, filled)
            if state is not None:
                state.scope.replaced.note(page.name, cast(nn.Parameter, sharded))
