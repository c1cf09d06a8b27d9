"""What a plan decides, each axis and choice in words: the head of every report."""

from collections.abc import Iterator

from autoplan.plan.plan import MESH_AXES, Plan, Precision
from autoplan.plan.rows import tied_across_stages
from autoplan.plan.runnable import cannot_run
from autoplan.plan.words import count_text, gap_text, rate_text, share_text, time_text
from autoplan.sharding import Shard

Pairs = tuple[tuple[str, str], ...]
_MOST_REASONS = 8
"""Reasons for refusals that are shown one by one."""
_NO_GAP = 1e-9
"""Share of the step below which a gap is rounding."""

SCHEDULE_WORDS = {
    "1f1b": "1F1B (a backward pass follows each forward pass once the pipeline is full)",
    "interleaved": "interleaved 1F1B (each rank takes its stages in turn)",
    "zero-bubble": "zero-bubble (ZB-H1: gradients of weights are computed where a rank would wait)",
    "zbv": "ZB-V (each rank holds one stage on the way there and one on the way back; gradients of weights fill waits)",
}


def summary_pairs(plan: Plan) -> Pairs:
    """Name and words of every choice; those that are as usual are left out."""
    return tuple(_summary(plan))


def _summary(plan: Plan) -> Iterator[tuple[str, str]]:
    yield "step", ", ".join([f"{time_text(plan.step.total)} predicted", *speed_words(plan)])
    yield "mesh", mesh_words(plan)
    yield "pipeline", pipeline_words(plan)
    yield "data", data_axis_words(plan)
    if plan.mesh.size("cp") > 1:
        yield "context", context_axis_words(plan)
    yield "tensor", tensor_axis_words(plan)
    if plan.expert > 1:
        yield "experts", expert_words(plan)
    if plan.offload:
        yield "offload", "optimizer states live in host memory"
    if plan.precision != Precision():
        yield "precision", precision_words(plan)
    yield "batch", batch_words(plan)
    yield "tied", _tied_words(plan)


def speed_words(plan: Plan) -> Iterator[str]:
    """Samples and tokens a second and MFU, as far as they are known."""
    total = plan.step.total
    if total:
        yield f"{rate_text(plan.batch_size / total * 1e6)} samples/s"
    if total and plan.tokens:
        yield f"{rate_text(plan.tokens / total * 1e6)} tokens/s"
    if plan.mfu:
        yield f"MFU {share_text(plan.mfu)}"


def mesh_words(plan: Plan) -> str:
    """Degrees and their product; the order on the network where it is not the usual one."""
    shown = [axis for axis in plan.mesh.axes if axis != "cp" or plan.mesh.size("cp") > 1]
    product = " x ".join(f"{axis} {plan.mesh.size(axis)}" for axis in shown)
    several = [axis for axis in plan.mesh.axes if plan.mesh.size(axis) > 1]
    usual = several == [axis for axis in MESH_AXES if axis in several]
    order = "" if usual else f"; on the network, outermost first: {', '.join(several)}"
    return f"{product} = {count_text(plan.mesh.num_devices, 'device')}{order}"


def pipeline_words(plan: Plan) -> str:
    """What happens along pp."""
    pp = plan.mesh.size("pp")
    if pp == 1 and plan.chunks == 1:
        return "one stage" + (", gradients accumulated over the microbatches" if plan.num_microbatches > 1 else "")
    several = f" on {count_text(pp, 'place')}, {plan.chunks} chunks each" if plan.chunks > 1 else ""
    return f"{pp * plan.chunks} stages{several}, schedule {SCHEDULE_WORDS[plan.schedule]}"


def data_axis_words(plan: Plan) -> str:
    """What the data ranks share."""
    ranks, shards = plan.data_ranks, plan.shards
    if ranks == 1:
        return "one replica"
    if plan.data == "replicate":
        return f"{ranks} whole replicas, gradients summed once a step"
    over = f"over {shards} replicas" if shards == ranks else f"over {shards} of {ranks} data ranks"
    copies = "" if shards == ranks else f", {count_text(ranks // shards, 'copy')} summed once a step"
    match plan.data:
        case "zero1":
            return f"parameters and gradients whole, optimizer states split {over}{copies} (ZeRO-1)"
        case "zero2":
            return f"parameters whole, gradients and optimizer states split {over}{copies} (ZeRO-2)"
        case "shard":
            name = "FSDP2" if shards == ranks else "hybrid FSDP2"
            return f"parameters, gradients and optimizer states are split {over}{copies} ({name})"


def over_data_words(plan: Plan) -> str:
    """Head of the column that tells how data ranks hold a weight."""
    whole = plan.shards in (1, plan.data_ranks)
    return f"over dp {plan.data_ranks}" if whole else f"over {plan.shards} of {plan.data_ranks} data ranks"


def context_axis_words(plan: Plan) -> str:
    """What happens along cp."""
    return f"the sequence of every sample is split over {plan.mesh.size('cp')} devices, which share parameters"


def tensor_axis_words(plan: Plan) -> str:
    """What happens along tp."""
    tp = plan.mesh.size("tp")
    if tp == 1:
        return "no split"
    crossing = {placement for stage in plan.stages for name in stage.layouts for placement in plan.layout(name).inputs}
    sequence = ", activations between layers along dim 1 (sequence)" if Shard(1) in crossing else ""
    strategies = [op.tensor for layout in plan.layouts for op in layout.ops]
    if not any(isinstance(p, Shard) for s in strategies for p in (*s.inputs, *s.outputs)):
        return f"nothing is split at this size: {count_text(tp, 'device')} do the same work"
    return f"each layer is split over {count_text(tp, 'device')}{sequence}"


def expert_words(plan: Plan) -> str:
    """Where experts live."""
    return f"split over {plan.expert} of {plan.data_ranks} data ranks, tokens travel between these"


def precision_words(plan: Plan) -> str:
    """Dtypes beside that of the parameters, those that were chosen."""
    found = [(name, getattr(plan.precision, name)) for name in ("gradients", "reductions", "states", "master")]
    words = {"gradients": "gradients in", "reductions": "summed over ranks in", "states": "optimizer states in",
             "master": "a master copy of the parameters in"}  # fmt: skip
    return ", ".join(f"{words[name]} {dtype}" for name, dtype in found if dtype is not None)


def batch_words(plan: Plan) -> str:
    """How a step's samples are cut."""
    return (
        f"{plan.batch_size} samples = dp {plan.mesh.size('dp')} x {count_text(plan.num_microbatches, 'microbatch')} of "
        f"{plan.batch_size // plan.parts}"
    )


def _tied_words(plan: Plan) -> str:
    tied = tied_across_stages(plan)
    if not tied:
        return "no parameter lives on more than one stage"
    return f"{', '.join(tied)}: a copy on each stage that uses it, gradients summed once a step"


def not_yet_words(plan: Plan) -> str:
    """What keeps this version from running the plan; nothing when it runs."""
    found = cannot_run(plan)
    if not found:
        return ""
    return f"This version cannot run it yet: {'; '.join(found)}. A search with --runnable leaves such plans out."


def proof_pairs(plan: Plan) -> Pairs:
    """How good the plan is, which bound proves it, and what became of the candidates."""
    proof = plan.proof
    if proof.status == "priced":
        return (("answer", verdict_words(plan)),)
    tried = proof.num_solved + proof.num_bounded + proof.num_refused
    counts = (
        f"{tried:,} candidate{'s' if tried != 1 else ''}: {proof.num_solved:,} solved, {proof.num_bounded:,} bounded "
        f"away (even their lower bound is no better), {proof.num_refused:,} refused"
    )
    refused = [("refused", f"{count:,}: {reason}") for reason, count in proof.refusals[:_MOST_REASONS]]
    if len(proof.refusals) > _MOST_REASONS:
        rest = sum(count for _, count in proof.refusals[_MOST_REASONS:])
        refused.append(("refused", f"{rest:,}: for {len(proof.refusals) - _MOST_REASONS} other reasons"))
    return (
        ("answer", verdict_words(plan)),
        ("bound", f"{time_text(proof.bound_us)}: {proof.bound_by}"),
        ("searched", counts),
        *refused,
    )


def verdict_words(plan: Plan) -> str:
    """``optimal``, ``within 0.4%``, or the best so far of a search that was stopped."""
    gap = plan.proof.gap(plan.step.total)
    good = (
        f"within {gap_text(gap)} of the optimum of the cost model"
        if gap > _NO_GAP
        else "optimal by the cost model: no plan in the space that was searched is faster"
    )
    match plan.proof.status:
        case "complete":
            return good
        case "time limit":
            return f"the time limit ended the search: best so far, {good}"
        case "interrupted":
            return f"the search was interrupted: best so far, {good}"
        case "priced":
            return "priced as given, not searched: nothing is proven about better plans"
