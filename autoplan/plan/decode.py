"""JSON values -> Plan, strictly: whatever is unknown, missing or of another type is an error that names its place.

Parameters are written by pattern; a single name beside a pattern wins over it. The last step is ``verify_plan``.
"""

from collections.abc import Iterator
from dataclasses import replace

from autoplan.cluster import Cluster, Mesh
from autoplan.plan import details, reading
from autoplan.plan.patterns import Layers, by_pattern, expand_names, matches, pattern_of
from autoplan.plan.plan import (
    DATA_MODES,
    MESH_AXES,
    RECOMPUTE,
    SCHEDULES,
    SCHEMA_VERSION,
    CollectiveCount,
    Layout,
    LayoutCost,
    OpPlacement,
    ParamPlacement,
    Plan,
    RunnerUp,
    Stage,
)
from autoplan.plan.reading import Place, fail, items, members
from autoplan.plan.verify import COLLECTIVE_AXES, verify_plan
from autoplan.sharding import REPLICATE, CollectiveKind

_PLAN_KEYS = (
    "schema_version", "version", "model", "graph_digest", "batch_size", "dtype", "cluster", "profile_digest",
    "mesh", "schedule", "chunks", "num_microbatches", "data", "shards", "expert", "offload", "precision", "step_us",
    "kind_names", "segments", "stages", "parameters", "parameter_names", "inputs", "prelude", "layouts", "runners_up",
    "proof", "choices", "model_flops", "peak_flops_per_s", "tokens", "origin", "assumptions",
)  # fmt: skip

_MOST_LAYERS = 1_000_000
"""A slip in a number must not fill the memory."""


def plan_from_json(data: object) -> Plan:
    """The plan that ``plan_to_json`` wrote. Raises PlanError that names the place (``stages[1].layouts[3]``)."""
    whole_plan = Place("", data)
    _check_schema(whole_plan)
    at = members(whole_plan, _PLAN_KEYS)
    kind_names = tuple(reading.text(item) for item in items(at["kind_names"]))
    segments = [segment for item in items(at["segments"]) for segment in _segments_from_json(item, kind_names)]
    plan = Plan(
        version=reading.text(at["version"]),
        model=reading.text(at["model"]),
        graph_digest=reading.text(at["graph_digest"]),
        batch_size=reading.whole(at["batch_size"], least=1),
        dtype=reading.text(at["dtype"]),
        cluster=_cluster_from_json(at["cluster"]),
        profile_digest=reading.text(at["profile_digest"]),
        mesh=_mesh_from_json(at["mesh"]),
        schedule=reading.choice(at["schedule"], SCHEDULES),
        chunks=reading.whole(at["chunks"], least=1),
        num_microbatches=reading.whole(at["num_microbatches"], least=1),
        data=reading.choice(at["data"], DATA_MODES),
        shards=reading.whole(at["shards"], least=1),
        expert=reading.whole(at["expert"], least=1),
        offload=reading.flag(at["offload"]),
        precision=details.precision_from_json(at["precision"]),
        kind_names=kind_names,
        segment_kinds=tuple(kind for kind, _ in segments),
        segment_params=tuple(params for _, params in segments),
        prelude=tuple((node, reading.strategy(place)) for node, place in reading.entries(at["prelude"])),
        inputs=tuple((name, reading.placement(place)) for name, place in reading.entries(at["inputs"])),
        params=_parameters_from_json(at["parameters"], at["parameter_names"]),
        layouts=tuple(_layout_from_json(item, kind_names) for item in items(at["layouts"])),
        stages=tuple(_stage_from_json(item) for item in items(at["stages"])),
        step=reading.amounts(at["step_us"]),
        runners_up=tuple(_runner_up_from_json(item) for item in items(at["runners_up"])),
        proof=details.proof_from_json(at["proof"]),
        choices=tuple(details.choice_from_json(item) for item in items(at["choices"])),
        model_flops=reading.whole(at["model_flops"], bits=127),  # a step of a large model takes more than 2**64
        peak_flops_per_s=reading.number(at["peak_flops_per_s"]),
        tokens=reading.whole(at["tokens"]),
        origin=details.origin_from_json(at["origin"]),
        assumptions=tuple(reading.pair(item) for item in items(at["assumptions"])),
    )
    verify_plan(plan)
    return plan


def _check_schema(whole_plan: Place) -> None:
    """First of all, since another schema has other keys."""
    version = dict(reading.entries(whole_plan)).get("schema_version")
    if version is None:
        fail(whole_plan, "not a plan: the key 'schema_version' is missing")
    if reading.whole(version) != SCHEMA_VERSION:
        fail(
            version,
            f"this plan has schema version {version.value}, this autoplan reads version {SCHEMA_VERSION}: "
            "search again, or use the autoplan that wrote it",
        )


def _cluster_from_json(place: Place) -> Cluster:
    at = members(place, ("num_nodes", "devices_per_node", "device", "memory_bytes"))
    return Cluster(
        num_nodes=reading.whole(at["num_nodes"], least=1),
        devices_per_node=reading.whole(at["devices_per_node"], least=1),
        device=reading.text(at["device"]),
        memory_bytes=reading.whole(at["memory_bytes"], least=1),
    )


def _mesh_from_json(place: Place) -> Mesh:
    at = members(place, MESH_AXES)
    axes = tuple(axis for axis, _ in reading.entries(place))
    return Mesh(axes=axes, sizes=tuple(reading.whole(at[axis], least=1) for axis in axes))


def _kind_from_json(place: Place, kind_names: tuple[str, ...]) -> int:
    return kind_names.index(reading.choice(place, kind_names))


def _segments_from_json(place: Place, kind_names: tuple[str, ...]) -> Iterator[tuple[int, tuple[str, ...]]]:
    folded = any(key == "layers" for key, _ in reading.entries(place))
    at = members(place, ("kind", "layers", "parameters") if folded else ("kind", "parameters"))
    kind = _kind_from_json(at["kind"], kind_names)
    names = tuple(reading.text(item) for item in items(at["parameters"]))
    for layer in _layers_from_json(at["layers"], names).expand() if folded else (names,):
        yield kind, layer


def _parameters_from_json(patterns: Place, names: Place) -> tuple[ParamPlacement, ...]:
    listed = _names_from_json(names)
    placements = _placements_by_name(patterns, listed)
    for name in listed:
        if name not in placements:
            fail(patterns, f"no placement for {name!r}: add it, by name or by the pattern {pattern_of(name)!r}")
    return tuple(replace(placements[name], name=name) for name in listed)


def _placement_from_json(pattern: str, place: Place) -> ParamPlacement:
    split = any(key == "ep" for key, _ in reading.entries(place))
    at = members(place, ("tp", "dp", "ep") if split else ("tp", "dp"))
    expert = reading.placement(at["ep"]) if split else REPLICATE
    return ParamPlacement(
        name=pattern, tensor=reading.placement(at["tp"]), data=reading.placement(at["dp"]), expert=expert
    )


def _placements_by_name(patterns: Place, names: tuple[str, ...]) -> dict[str, ParamPlacement]:
    """Placements of every parameter; one written for a single name wins over one that a pattern gives."""
    known, groups = set(names), by_pattern(names)
    single: dict[str, ParamPlacement] = {}
    grouped: dict[str, ParamPlacement] = {}
    for pattern, place in reading.entries(patterns):
        placements = _placement_from_json(pattern, place)
        if pattern in known:
            single[pattern] = placements
            continue
        found = [name for name in groups.get(pattern_of(pattern), ()) if matches(pattern, name)]
        if not found:
            near = reading.did_you_mean(pattern, [*groups, *names])
            fail(place, f"matches no parameter of the model{near} In a pattern * stands for one number")
        if twice := grouped.keys() & found:
            fail(place, f"{min(twice)!r} also belongs to another pattern: name it by itself, or change one of them")
        grouped |= dict.fromkeys(found, placements)
    return grouped | single


def _names_from_json(place: Place) -> tuple[str, ...]:
    names = expand_names(tuple(_name_item_from_json(item) for item in items(place)))
    if len(set(names)) != len(names):
        repeated = next(name for i, name in enumerate(names) if name in names[:i])
        fail(place, f"{repeated!r} is listed twice: remove one")
    return names


def _name_item_from_json(place: Place) -> str | Layers:
    if isinstance(place.value, str):
        return place.value
    at = members(place, ("layers", "names"))
    return _layers_from_json(at["layers"], tuple(reading.text(item) for item in items(at["names"])))


def _layers_from_json(place: Place, names: tuple[str, ...]) -> Layers:
    span = [reading.whole(item) for item in items(place)]
    if len(span) != 2 or span[0] > span[1]:
        fail(place, "expected the first and the last layer, such as [0, 15]")
    if span[1] - span[0] >= _MOST_LAYERS:
        fail(place, f"{span[1] - span[0] + 1} layers are more than any model has: correct the numbers")
    return Layers(first=span[0], last=span[1], names=names)


def _stage_from_json(place: Place) -> Stage:
    times = ("forward_us", "backward_us", "weight_us")
    names = ("start", "end", "rank", "layouts", *times, "memory_bytes", "collectives")
    at = members(place, names)
    return Stage(
        start=reading.whole(at["start"]),
        end=reading.whole(at["end"]),
        rank=reading.whole(at["rank"]),
        layouts=tuple(reading.text(item) for item in items(at["layouts"])),
        forward_us=reading.number(at["forward_us"]),
        backward_us=reading.number(at["backward_us"]),
        weight_us=reading.number(at["weight_us"]),
        memory=reading.amounts(at["memory_bytes"]),
        collectives=_collectives_from_json(at["collectives"]),
    )


def _collectives_from_json(place: Place) -> tuple[CollectiveCount, ...]:
    return tuple(_collective_from_json(item) for item in items(place))


def _collective_from_json(place: Place) -> CollectiveCount:
    at = members(place, ("axis", "kind", "count", "num_bytes"))
    return CollectiveCount(
        axis=reading.choice(at["axis"], COLLECTIVE_AXES),
        kind=CollectiveKind(reading.choice(at["kind"], tuple(kind.value for kind in CollectiveKind))),
        count=reading.whole(at["count"]),
        num_bytes=reading.whole(at["num_bytes"]),
    )


def _layout_from_json(place: Place, kind_names: tuple[str, ...]) -> Layout:
    at = members(place, ("name", "kind", "recompute", "inputs", "outputs", "ops", "cost"))
    return Layout(
        name=reading.text(at["name"]),
        kind=_kind_from_json(at["kind"], kind_names),
        recompute=reading.choice(at["recompute"], RECOMPUTE),
        ops=tuple(_op_from_json(item) for item in items(at["ops"])),
        inputs=tuple(reading.placement(item) for item in items(at["inputs"])),
        outputs=tuple(reading.placement(item) for item in items(at["outputs"])),
        cost=_cost_from_json(at["cost"]),
    )


def _op_from_json(place: Place) -> OpPlacement:
    split = any(key == "context" for key, _ in reading.entries(place))
    at = members(place, ("node", "batch", "tensor", "context") if split else ("node", "batch", "tensor"))
    return OpPlacement(
        node=reading.text(at["node"]),
        batch=reading.strategy(at["batch"]),
        tensor=reading.strategy(at["tensor"]),
        context=reading.strategy(at["context"]) if split else None,
    )


def _cost_from_json(place: Place) -> LayoutCost:
    times = ("forward_us", "backward_us", "weight_us", "forward_comm_us", "backward_comm_us")
    at = members(place, (*times, "activation_bytes", "transient_bytes", "collectives"))
    return LayoutCost(
        forward_us=reading.number(at["forward_us"]),
        backward_us=reading.number(at["backward_us"]),
        weight_us=reading.number(at["weight_us"]),
        forward_comm_us=reading.number(at["forward_comm_us"]),
        backward_comm_us=reading.number(at["backward_comm_us"]),
        activation_bytes=reading.whole(at["activation_bytes"]),
        transient_bytes=reading.whole(at["transient_bytes"]),
        collectives=_collectives_from_json(at["collectives"]),
    )


def _runner_up_from_json(place: Place) -> RunnerUp:
    at = members(place, ("label", "step_us", "reason"))
    step = at["step_us"]
    return RunnerUp(
        label=reading.text(at["label"]),
        step_us=None if step.value is None else reading.number(step),
        reason=reading.text(at["reason"]),
    )
