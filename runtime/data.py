"""The parameters of one pipeline stage: DTensors for the user, local tensors for the segments.

On the data axis a parameter is either split by FSDP2 (``data = Shard``), which gathers it around each use and
reduce-scatters its gradient, or whole on each rank, with its gradient all-reduced once a step. A parameter that
several segments of the stage read (a tied head) is held by the stage itself.
"""

import math
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

from autoplan.plan.plan import ParamPlacement
from autoplan.runtime.collectives import AxisGroup
from autoplan.runtime.layouts import as_dtensor, local_part, to_torch
from autoplan.runtime.mesh import RankMesh
from autoplan.sharding import REPLICATE_PARTIAL_GRAD, Shard

Run = Callable[..., tuple[Tensor, ...]]

NORM_SHARE = "autoplan_norm_share"
"""Attribute of a parameter, which is all that ``clip_grad_norm_`` is handed."""


class ReadParam(Protocol):
    """Gives the whole tensor of a parameter, or a meta tensor where its value comes later."""

    def __call__(self, name: str) -> Tensor:
        """Look it up under its name in ``state_dict``."""
        ...


@contextmanager
def views_allowed() -> Iterator[None]:
    """Silence FSDP2's warning that a module returned a view: nothing here ever writes into one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view")
        yield


class SegmentModule(nn.Module):
    """One segment of the stage: holds what only it reads, and runs what it is handed inside FSDP2's hooks."""

    def forward(self, run: Run, *values: Tensor) -> tuple[Tensor, ...]:
        """Run the segment on the values it reads; FSDP2's hooks see them pass."""
        return run(*values)


class StageModule(nn.Module):
    """All parameters of a stage, by name."""

    def __init__(
        self,
        segment_params: Sequence[tuple[str, ...]],
        placements: Mapping[str, ParamPlacement],
        read: ReadParam,
        ranks: RankMesh,
        unused: Sequence[str] = (),
    ) -> None:
        """``segment_params`` names what each segment of the stage reads; ``read`` gives the whole tensors.

        ``unused`` parameters are read by nothing: they are kept for ``state_dict`` and never get a gradient.
        """
        super().__init__()
        self._ranks = ranks
        self._placements = placements
        self.segments = nn.ModuleList(SegmentModule() for _ in segment_params)
        self._home: dict[str, tuple[nn.Module, str]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._leaves: dict[str, Tensor] = {}
        self.first_segment = {n: i for i, names in reversed(list(enumerate(segment_params))) for n in names}
        users = Counter(name for names in segment_params for name in set(names))
        for name in sorted(self.first_segment, key=lambda n: self.first_segment[n]):
            home = self if users[name] > 1 else self.segments[self.first_segment[name]]
            self._add(name, home, read(name))
        for name in unused:
            self._add(name, self, read(name))
        self._shard_over_data()

    def forward(self, run: Run, *values: Tensor) -> tuple[Tensor, ...]:
        """Run the stage on what arrives from the one before, inside FSDP2's hooks for what several segments share."""
        return run(*values)

    def _add(self, name: str, home: nn.Module, whole: Tensor) -> None:
        placement, ranks = self._placements[name], self._ranks
        local = local_part(whole.detach(), placement.tensor, ranks.tp.size, ranks.tp.coordinate)
        local = torch.empty_like(local, device=ranks.device).copy_(local) if not local.is_meta else torch.empty(
            local.shape, dtype=local.dtype, device=ranks.device
        )  # fmt: skip
        shape = tuple(whole.shape)
        if isinstance(placement.data, Shard):
            state = as_dtensor(local.contiguous(), ranks.mesh["tp"], (to_torch(placement.tensor),), shape)
        else:
            placements = (TorchReplicate(), to_torch(placement.tensor))
            state = as_dtensor(local.contiguous(), ranks.state_mesh, placements, shape)
        key = f"p{len(self._home)}"
        home.register_parameter(key, nn.Parameter(state, requires_grad=whole.requires_grad))
        self._home[name] = (home, key)
        self._shapes[name] = shape
        if not isinstance(placement.data, Shard):
            self._leaves[name] = state.to_local().detach().requires_grad_(whole.requires_grad)

    def _shard_over_data(self) -> None:
        names = {id(self.param(name)): name for name in self._home}
        if not any(isinstance(self._placements[n].data, Shard) for n in self._home):
            return

        def placement(param: nn.Parameter) -> TorchShard:
            data = self._placements[names[id(param)]].data
            assert isinstance(data, Shard)
            return TorchShard(data.dim)

        whole = {self.param(name) for name in self._leaves}
        for module in [*self.segments, self]:
            fully_shard(
                module, mesh=self._ranks.mesh["dp"], reshard_after_forward=True,
                shard_placement_fn=placement, ignored_params=whole,
            )  # fmt: skip
            assert isinstance(module, FSDPModule)
            # Losses are divided by the global count, so gradients add up; NCCL and gloo both know plain sums.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

    def mark_shares(self, counted_elsewhere: Collection[str]) -> None:
        """Note on each parameter what part of its local norm counts in the global one.

        That is one over the ranks that hold the same elements, and nothing for what another stage answers for.
        """
        for name in self.names:
            state = self.param(name)
            assert isinstance(state, DTensor)
            mesh = state.device_mesh
            copies = math.prod(mesh.size(i) for i, p in enumerate(state.placements) if p.is_replicate())
            setattr(state, NORM_SHARE, 0.0 if name in counted_elsewhere else 1.0 / copies)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters of this stage, in order of first use."""
        return tuple(self._home)

    def param(self, name: str) -> nn.Parameter:
        """The parameter as the user sees it: a DTensor on the (dp, tp) mesh."""
        home, key = self._home[name]
        return home.get_parameter(key)

    def local(self, name: str) -> Tensor:
        """What a segment computes with; valid while the segment (or stage) that holds it runs."""
        leaf = self._leaves.get(name)
        if leaf is not None:
            return leaf
        gathered = self.param(name)
        assert isinstance(gathered, DTensor)
        return gathered.to_local(grad_placements=gathered.placements)

    def local_state(self, name: str) -> Tensor:
        """What this rank keeps of a parameter between steps."""
        state = self.param(name)
        assert isinstance(state, DTensor)
        return state.to_local().detach()

    def local_part_of(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor laid out like the parameter."""
        placement, ranks = self._placements[name], self._ranks
        part = local_part(whole, placement.tensor, ranks.tp.size, ranks.tp.coordinate)
        return local_part(part, placement.data, ranks.dp.size, ranks.dp.coordinate)

    @torch.no_grad()
    def fill(self, name: str, whole: Tensor) -> None:
        """Set a parameter from its whole tensor. ValueError when the shape differs."""
        if tuple(whole.shape) != self._shapes[name]:
            raise ValueError(f"{name} has shape {list(self._shapes[name])}, found {list(whole.shape)}")
        state = self.param(name)
        assert isinstance(state, DTensor)
        state.to_local().copy_(self.local_part_of(name, whole))

    def set_last_microbatch(self, last: bool) -> None:
        """Tell FSDP2 whether the next backward ends the step: only then are gradients reduced."""
        if isinstance(self, FSDPModule):
            self.set_requires_gradient_sync(last)
            self.set_is_last_backward(last)

    def take_gradients(self) -> dict[str, Tensor]:
        """Reduce this step's gradients and hand them over as local tensors, leaving none behind."""
        grads: dict[str, Tensor] = {}
        for name in self.names:
            leaf = self._leaves.get(name)
            source = self.param(name) if leaf is None else leaf
            if source.grad is not None:
                grads[name] = source.grad.to_local() if isinstance(source.grad, DTensor) else source.grad
                source.grad = None
        whole = [n for n in grads if n in self._leaves]
        partial = [n for n in grads if self._placements[n].tensor == REPLICATE_PARTIAL_GRAD]
        self._sum_by_segment(grads, whole, self._ranks.dp)
        self._sum_by_segment(grads, partial, self._ranks.tp)
        return grads

    def _sum_by_segment(self, grads: dict[str, Tensor], names: Sequence[str], axis: AxisGroup) -> None:
        """All-reduce the named gradients in place, one collective per segment and dtype."""
        if axis.size == 1:
            return
        buckets: dict[tuple[int, torch.dtype], list[str]] = {}
        for name in names:
            buckets.setdefault((self.first_segment[name], grads[name].dtype), []).append(name)
        for key in sorted(buckets, key=lambda k: (k[0], str(k[1]))):
            flat = torch.cat([grads[name].reshape(-1) for name in buckets[key]])
            dist.all_reduce(flat, group=axis.group)
            parts = torch.split(flat, [grads[name].numel() for name in buckets[key]])
            grads.update({n: part.view_as(grads[n]) for n, part in zip(buckets[key], parts, strict=True)})

    def gradient(self, name: str, local: Tensor) -> DTensor:
        """A local gradient as the DTensor that belongs to the parameter."""
        state = self.param(name)
        assert isinstance(state, DTensor)
        assert not any(isinstance(p, Partial) for p in state.placements)
        return as_dtensor(local, state.device_mesh, state.placements, self._shapes[name])
