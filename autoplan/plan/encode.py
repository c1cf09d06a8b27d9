"""Plan -> JSON values: what ``decode`` reads back, in the order a person reads it.

Parameters are written by pattern ({"h.*.attn.weight": {"tp": "Shard(0)", "dp": "Replicate"}}, see ``patterns``).
"""

import itertools
import operator
from collections.abc import Iterable, Iterator

from autoplan.plan.patterns import Layers, fold_names, fold_segments, fold_values
from autoplan.plan.plan import (
    Choice,
    CollectiveCount,
    Layout,
    OpPlacement,
    Origin,
    ParamPlacement,
    Plan,
    Proof,
    Stage,
)
from autoplan.sharding import REPLICATE

PRECISION_KEYS = ("gradients", "reductions", "states", "master")


def plan_to_json(plan: Plan) -> dict[str, object]:
    """The plan as JSON values, keys in reading order."""
    return {
        "schema_version": plan.schema_version,
        "version": plan.version,
        "model": plan.model,
        "graph_digest": plan.graph_digest,
        "batch_size": plan.batch_size,
        "dtype": plan.dtype,
        "cluster": {
            "num_nodes": plan.cluster.num_nodes,
            "devices_per_node": plan.cluster.devices_per_node,
            "device": plan.cluster.device,
            "memory_bytes": plan.cluster.memory_bytes,
        },
        "profile_digest": plan.profile_digest,
        "mesh": dict(zip(plan.mesh.axes, plan.mesh.sizes, strict=True)),
        "schedule": plan.schedule,
        "chunks": plan.chunks,
        "num_microbatches": plan.num_microbatches,
        "data": plan.data,
        "shards": plan.shards,
        "expert": plan.expert,
        "offload": plan.offload,
        "precision": {name: getattr(plan.precision, name) for name in PRECISION_KEYS},
        "step_us": _map(plan.step),
        "kind_names": list(plan.kind_names),
        "segments": list(_segments_to_json(plan)),
        "stages": [_stage_to_json(stage) for stage in plan.stages],
        "parameters": _parameters_to_json(plan.params),
        "parameter_names": [_names_to_json(item) for item in fold_names(tuple(p.name for p in plan.params))],
        "inputs": _map((name, str(placement)) for name, placement in plan.inputs),
        "prelude": _map((node, str(strategy)) for node, strategy in plan.prelude),
        "layouts": [_layout_to_json(layout, plan.kind_names) for layout in plan.layouts],
        "runners_up": [
            {"label": other.label, "step_us": other.step_us, "reason": other.reason} for other in plan.runners_up
        ],
        "proof": _proof_to_json(plan.proof),
        "choices": [_choice_to_json(choice) for choice in plan.choices],
        "model_flops": plan.model_flops,
        "peak_flops_per_s": plan.peak_flops_per_s,
        "tokens": plan.tokens,
        "origin": _origin_to_json(plan.origin),
        "assumptions": [[name, text] for name, text in plan.assumptions],
    }


def _map(pairs: Iterable[tuple[str, object]]) -> dict[str, object]:
    """An object in the order of the pairs; a repeated key would be lost in the file."""
    listed = list(pairs)
    found = dict(listed)
    assert len(found) == len(listed), f"repeated names in {[name for name, _ in listed]}"
    return found


def _parameters_to_json(params: tuple[ParamPlacement, ...]) -> dict[str, object]:
    assert len({p.name for p in params}) == len(params), "two parameters of one name"
    folded = fold_values({p.name: (str(p.tensor), str(p.data), str(p.expert)) for p in params})
    return {
        pattern: {"tp": tensor, "dp": data} | ({} if expert == str(REPLICATE) else {"ep": expert})
        for pattern, (tensor, data, expert) in folded.items()
    }


def _segments_to_json(plan: Plan) -> Iterator[dict[str, object]]:
    """One entry a segment, or one for a run of layers alike but for the number in their parameters' names."""
    chain = zip(plan.segment_kinds, plan.segment_params, strict=True)
    for kind, run in itertools.groupby(chain, key=operator.itemgetter(0)):
        rest = tuple(params for _, params in run)
        while rest:
            entry: dict[str, object] = {"kind": plan.kind_names[kind]}
            if layers := fold_segments(rest):
                yield entry | {"layers": [layers.first, layers.last], "parameters": list(layers.names)}
            else:
                yield entry | {"parameters": list(rest[0])}
            rest = rest[layers.last - layers.first + 1 if layers else 1 :]


def _names_to_json(item: str | Layers) -> object:
    if isinstance(item, str):
        return item
    return {"layers": [item.first, item.last], "names": list(item.names)}


def _stage_to_json(stage: Stage) -> dict[str, object]:
    return {
        "start": stage.start,
        "end": stage.end,
        "rank": stage.rank,
        "layouts": list(stage.layouts),
        "forward_us": stage.forward_us,
        "backward_us": stage.backward_us,
        "weight_us": stage.weight_us,
        "memory_bytes": _map(stage.memory),
        "collectives": [_collective_to_json(c) for c in stage.collectives],
    }


def _collective_to_json(collective: CollectiveCount) -> dict[str, object]:
    return {
        "axis": collective.axis,
        "kind": collective.kind.value,
        "count": collective.count,
        "num_bytes": collective.num_bytes,
    }


def _layout_to_json(layout: Layout, kind_names: tuple[str, ...]) -> dict[str, object]:
    return {
        "name": layout.name,
        "kind": kind_names[layout.kind],
        "recompute": layout.recompute,
        "inputs": [str(placement) for placement in layout.inputs],
        "outputs": [str(placement) for placement in layout.outputs],
        "ops": [_op_to_json(op) for op in layout.ops],
        "cost": {
            "forward_us": layout.cost.forward_us,
            "backward_us": layout.cost.backward_us,
            "weight_us": layout.cost.weight_us,
            "forward_comm_us": layout.cost.forward_comm_us,
            "backward_comm_us": layout.cost.backward_comm_us,
            "activation_bytes": layout.cost.activation_bytes,
            "transient_bytes": layout.cost.transient_bytes,
            "collectives": [_collective_to_json(c) for c in layout.cost.collectives],
        },
    }


def _op_to_json(op: OpPlacement) -> dict[str, object]:
    context: dict[str, object] = {} if op.context is None else {"context": str(op.context)}
    return {"node": op.node, "batch": str(op.batch), "tensor": str(op.tensor)} | context


def _proof_to_json(proof: Proof) -> dict[str, object]:
    return {
        "status": proof.status,
        "bound_us": proof.bound_us,
        "bound_by": proof.bound_by,
        "num_solved": proof.num_solved,
        "num_bounded": proof.num_bounded,
        "num_refused": proof.num_refused,
        "refusals": [[reason, count] for reason, count in proof.refusals],
    }


def _choice_to_json(choice: Choice) -> dict[str, object]:
    return {
        "label": choice.label,
        "step_us": _map(choice.step),
        "peak_bytes": choice.peak_bytes,
        "on_front": choice.on_front,
    }


def _origin_to_json(origin: Origin) -> dict[str, object]:
    return {
        "model": origin.model,
        "cluster": origin.cluster,
        "seq_len": origin.seq_len,
        "dtype": origin.dtype,
        "options": [[name, text] for name, text in origin.options],
    }
