"""Pinned schedule, chunks and cuts: they agree with each other, with the degrees, and with the chain of segments."""

from itertools import groupby, pairwise

from autoplan.cluster import Cluster
from autoplan.errors import InputError
from autoplan.ir import SegmentedGraph
from autoplan.plan.plan import MESH_AXES, ScheduleKind
from autoplan.plan.schedule import allowed
from autoplan.plan.words import count_text
from autoplan.solver.mesh import divisors
from autoplan.solver.pins_degrees import listed, pipeline_room
from autoplan.solver.request import Request

_CHUNKS: dict[ScheduleKind | None, tuple[int, int | None]] = {
    "1f1b": (1, 1), "interleaved": (2, None), "zero-bubble": (1, None), "zbv": (2, 2), None: (1, None),
}  # fmt: skip
"""Least and most stages per rank of each schedule, and where none is pinned."""


def check_schedule(sg: SegmentedGraph, cluster: Cluster, request: Request) -> None:
    """Schedule, chunks and pipeline degree can be together, and every stage has a segment."""
    kind, chunks = request.schedule, request.chunks
    if pipeline_room(cluster, request) == 1:
        alone = "pp=1 is pinned" if request.pp == 1 else f"the other pinned degrees leave pp=1 on {cluster}"
        if kind not in (None, "1f1b"):
            raise InputError(f"schedule={kind} needs a pipeline, but {alone}: leave one of them out")
        if chunks not in (None, 1):
            raise InputError(f"chunks={chunks} are stages per rank of a pipeline, but {alone}: leave one of them out")
    if kind is not None and chunks is not None:
        _check_chunks(kind, chunks)
    _check_stages(sg, request)
    _check_microbatches(sg.graph.batch_size, request)


def _check_chunks(kind: ScheduleKind, chunks: int) -> None:
    if reason := allowed(kind, 1, chunks, 1):
        least, most = _CHUNKS[kind]
        valid = str(least) if most == least else f"{least} or more"
        raise InputError(f"schedule={kind} cannot have chunks={chunks}: {reason}; valid chunks: {valid}")


def _check_stages(sg: SegmentedGraph, request: Request) -> None:
    segments, chunks = len(sg.segments), request.chunks or _CHUNKS[request.schedule][0]
    several = chunks > 1 or request.schedule not in (None, "1f1b")
    ranks = request.pp or (2 if several else 1)
    if ranks * chunks <= segments:
        return
    if chunks == 1:
        raise InputError(f"pp={ranks} needs as many segments, the model has {segments}; use at most that")
    why = f"schedule={request.schedule}" if request.chunks is None else f"chunks={chunks}"
    raise InputError(
        f"pp={ranks} with {why} needs {ranks * chunks} segments, {chunks} for each rank, and the model has {segments}; "
        f"pp x chunks can be at most {segments}"
    )


def _check_microbatches(batch: int, request: Request) -> None:
    """A pipeline is filled by at least a microbatch per rank, zbv by twice that; some counts make no equal rounds."""
    if request.pp is None or request.pp == 1:
        return
    dp, microbatch, chunks = request.dp or 1, request.microbatch or 1, request.chunks or _CHUNKS[request.schedule][0]
    most = batch // dp // microbatch
    least = 2 * request.pp - 1 if request.schedule == "zbv" else request.pp
    given = f"a batch of {batch} over dp={dp} in microbatches of {microbatch}"
    if most < least:
        needs = (
            f"{least} microbatches with schedule=zbv" if request.schedule == "zbv" else "at least as many microbatches"
        )
        raise InputError(
            f"pp={request.pp} needs {needs}, but {given} gives fewer: raise the batch, or lower pp, dp or microbatch"
        )
    if request.schedule is None or request.dp is None or request.microbatch is None:
        return
    if reason := allowed(request.schedule, request.pp, chunks, most):
        raise InputError(
            f"schedule={request.schedule} cannot run pp={request.pp}: {reason}. There are {most}, from {given}; change "
            "one of these"
        )


def check_cuts(sg: SegmentedGraph, cluster: Cluster, request: Request) -> None:
    """Cuts ascend inside the chain and make as many stages as the pipeline has."""
    cuts = request.cuts
    if cuts is None:
        return
    given, last = f"cuts={listed(cuts) or 'none'}", len(sg.segments) - 1
    if not all(1 <= cut <= last for cut in cuts):
        raise InputError(
            f"{given} do not all lie inside the chain: a cut is the position at which a stage after the "
            f"first begins, from 1 to {last}. {chain_text(sg)}"
        )
    if not all(a < b for a, b in pairwise(cuts)):
        raise InputError(f"{given} must ascend, each position once. {chain_text(sg)}")
    valid = _stage_counts(len(sg.segments), cluster, request)
    if len(cuts) + 1 not in valid:
        names = (*MESH_AXES, "schedule", "chunks")
        pinned = " and ".join(f"{name}={value}" for name in names if (value := getattr(request, name)) is not None)
        raise InputError(
            f"{given} make {count_text(len(cuts) + 1, 'stage')}, but {cluster}"
            f"{f' with {pinned}' if pinned else ''} can have {listed(valid)}: give one cut fewer than stages. "
            f"{chain_text(sg)}"
        )


def chain_text(sg: SegmentedGraph) -> str:
    """``The model has 6 segments: 0 embed, 1-4 block, 5 head``."""
    parts = []
    for kind, run in groupby(range(len(sg.segments)), key=lambda i: sg.segments[i].kind):
        first, *rest = run
        parts.append(f"{first}{f'-{rest[-1]}' if rest else ''} {sg.kind_names[kind]}")
    return f"The model has {count_text(len(sg.segments), 'segment')}: {', '.join(parts)}"


def _stage_counts(segments: int, cluster: Cluster, request: Request) -> tuple[int, ...]:
    """Numbers of stages that the pinned degree, schedule and chunks allow."""
    least, most = _CHUNKS[request.schedule]
    found = set()
    for pp in divisors(pipeline_room(cluster, request)) if request.pp is None else (request.pp,):
        for chunks in range(1, segments // pp + 1):
            plain = chunks == 1 and request.schedule in (None, "1f1b")
            possible = plain if pp == 1 else least <= chunks <= (most or chunks)
            if possible and request.chunks in (None, chunks):
                found.add(pp * chunks)
    return tuple(sorted(found))
