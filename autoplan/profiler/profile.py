"""The whole of it: cases, their measurement on the ranks that run, and the cluster file that comes out."""

import datetime
import difflib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from autoplan.cluster import Cluster
from autoplan.cost_models import ProfileCostModel, known_profiles, load_cluster, load_profile, machine
from autoplan.profiler import fit, write
from autoplan.profiler.cache import Cache, open_cache
from autoplan.profiler.cases import Case, DeviceKind, OpCase, compute_cases, overlap_cases, transfer_cases
from autoplan.profiler.collectives import make_world
from autoplan.profiler.consistent import consistent
from autoplan.profiler.measure import Stopwatch, Told, measure
from autoplan.profiler.model_ops import model_cases
from autoplan.profiler.timing import Effort, clocks
from autoplan.runtime.mesh import start_process_group

_QUICK = Effort(seconds=0.002, least=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What to measure, and where to keep it."""

    device: DeviceKind
    cache: Path
    models: tuple[str, ...] = ()
    global_batch: int | None = None
    seq_len: int | None = None
    quick: bool = False
    fresh: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Ranks that measure: how many, and how many share a node."""

    ranks: int
    per_node: int
    threads: int
    """Of each rank, on its CPU."""


def shape_of(ranks: int | None) -> Shape:
    """That of so many ranks of one thread on this machine, or that of the ranks that torchrun started."""
    if ranks is not None:
        return Shape(ranks=ranks, per_node=ranks, threads=1)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    return Shape(
        ranks=world, per_node=int(os.environ.get("LOCAL_WORLD_SIZE", str(world))), threads=torch.get_num_threads()
    )


def place_of(asked: Asked, shape: Shape) -> dict[str, str]:
    """What the times depend on."""
    return {
        **machine.describe(),
        "device": torch.cuda.get_device_name() if asked.device == "cuda" else "cpu",
        "threads": str(shape.threads),
        "ranks": str(shape.ranks),
        "ranks per node": str(shape.per_node),
        "effort": "quick" if asked.quick else "full",
    }


def cases_of(asked: Asked, shape: Shape, told: Told) -> tuple[Case, ...]:
    """All cases, in the order in which they are measured: those that a profile cannot do without come first."""
    cases: list[Case] = list(compute_cases(asked.device, asked.quick))
    if shape.ranks > 1:
        cases += transfer_cases(shape.ranks, shape.per_node, asked.quick)
        cases += overlap_cases(asked.device, shape.ranks, shape.per_node, asked.quick)
    if asked.models:
        cluster, cost = _base(asked, shape)
        for model in asked.models:
            cases += model_cases(
                model, cluster, cost, global_batch=asked.global_batch, seq_len=asked.seq_len, told=told
            )
    return tuple({case.key: case for case in cases}.values())


def run(asked: Asked, cases: Sequence[Case], told: Told) -> None:
    """Measure on the ranks that run, each calling this. Cases are those of rank 0, and it alone keeps the times."""
    device = torch.device("cpu")
    if asked.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        start_process_group()
    world = make_world(device)
    shape = Shape(ranks=world.size, per_node=world.per_node, threads=torch.get_num_threads())
    cache = open_cache(asked.cache, place_of(asked, shape), fresh=asked.fresh) if world.rank == 0 else None
    compute, transfer = clocks(device)
    watch = Stopwatch(compute=compute, transfer=transfer, effort=_QUICK if asked.quick else Effort())
    shared = [tuple(cases)]
    if world.size > 1:
        dist.broadcast_object_list(shared, src=0)
    measure(shared[0], world, cache, watch, told if world.rank == 0 else _silent)
    if dist.is_initialized():
        dist.barrier()


def is_known(asked: Asked, shape: Shape, cases: Sequence[Case]) -> bool:
    """Whether every case has been measured."""
    cache = open_cache(asked.cache, place_of(asked, shape), fresh=asked.fresh)
    return all(case.key in cache.times for case in cases)


def _silent(_message: str) -> None:
    pass


def cluster_file(asked: Asked, shape: Shape, cases: Sequence[Case]) -> str:
    """The text of a cluster file from what the cache holds; what is not there yet is that of a shipped profile."""
    cache = open_cache(asked.cache, place_of(asked, shape))
    return write.cluster_text(_found(asked, shape, cases, cache))


def _found(asked: Asked, shape: Shape, cases: Sequence[Case], cache: Cache) -> write.Found:
    numbers = fit.numbers(cases, cache.times)
    names = {}
    if asked.device == "cuda":
        numbers["memory.capacity_mib"] = torch.cuda.get_device_properties(0).total_memory / 2**20
        names["links.host.name"] = "to the host, as measured"
    here = machine.describe()
    ranks = "one process" if shape.ranks == 1 else f"{shape.ranks} ranks, all busy, {shape.per_node} in a node"
    return write.Found(
        base=base_profile(asked.device),
        nodes=shape.ranks // shape.per_node,
        per_node=shape.per_node,
        date=datetime.date.today().isoformat(),
        how=f"torch {here.get('torch', '?')}, {ranks}, threads of each: {shape.threads}",
        numbers=numbers,
        names=names,
        machine=here,
        collectives=tuple(fit.collective_points(cases, cache.times)),
        ops=consistent(list(fit.timed(cases, cache.times, OpCase))),
        left_out=tuple(case.key for case in cases if case.key in cache.times and cache.times[case.key] is None),
    )


def base_profile(device: DeviceKind) -> str:
    """The shipped profile that has what is not measured: that of this device, or the one whose name is nearest."""
    if device == "cpu":
        return "cpu"
    name = torch.cuda.get_device_name().removeprefix("NVIDIA ").replace(" ", "-")
    gpus = [known for known in known_profiles() if known != "cpu"]
    nearest = difflib.get_close_matches(name, gpus, n=1, cutoff=0.0)
    return load_profile(nearest[0]).name


def _base(asked: Asked, shape: Shape) -> tuple[Cluster, ProfileCostModel]:
    """The cluster by the shipped profile, for which the ops of a model are listed."""
    cluster, profile = load_cluster(f"{shape.ranks // shape.per_node}x{shape.per_node}x{base_profile(asked.device)}")
    return cluster, ProfileCostModel(cluster=cluster, profile=profile)
