"""A hand-built plan with what ``sample.py`` leaves out: cp, experts, chunks, hybrid sharding, offload, precision."""

import dataclasses

from plan.sample import MIB, collective, memory, sample_plan

from autoplan.cluster import Cluster, Mesh
from autoplan.plan.plan import Amounts, Choice, Plan, Precision, Proof, Stage
from autoplan.sharding import REPLICATE, Shard

STEP = Amounts(
    by_cause=(
        ("compute", 41_000.0),
        ("tensor communication", 2_000.0),
        ("expert communication", 3_000.0),
        ("bubble", 4_000.0),
        ("optimizer", 900.0),
    )
)


def stage(index: int, start: int, end: int, layouts: tuple[str, ...]) -> Stage:
    rank = index % 2
    return Stage(
        rank=rank,
        start=start,
        end=end,
        layouts=layouts,
        forward_us=1000.0 + index,
        backward_us=2000.0 + index,
        weight_us=700.0,
        memory=memory(1000 + 100 * rank, 30_000),
        collectives=(
            collective("ep", "all_to_all", 16, 16 * 6 * MIB),
            collective("replicas", "all_reduce", 1 + rank, 9 * MIB),
        ),
    )


def choice(label: str, bubble: float, peak_gib: int, on_front: bool) -> Choice:
    causes = tuple((cause, bubble if cause == "bubble" else amount) for cause, amount in STEP)
    return Choice(label=label, step=Amounts(by_cause=causes), peak_bytes=peak_gib * 2**30, on_front=on_front)


def wide_plan() -> Plan:
    plan = sample_plan()
    params = tuple(
        dataclasses.replace(p, data=REPLICATE, expert=Shard(0) if "mlp" in p.name else REPLICATE) for p in plan.params
    )
    label = "pp=2 dp=4 cp=2 tp=2 ep=4, interleaved x 2, 4 microbatches of 4, data zero2 over 4"
    return dataclasses.replace(
        plan,
        params=params,
        cluster=Cluster(num_nodes=4, devices_per_node=8, device="H100", memory_bytes=76 * 2**30),
        mesh=Mesh(axes=("dp", "pp", "cp", "tp"), sizes=(4, 2, 2, 2)),
        schedule="interleaved",
        chunks=2,
        data="zero2",
        shards=4,
        expert=4,
        offload=True,
        precision=Precision(gradients="float32", reductions="float32", states="float32", master="float32"),
        stages=(
            stage(0, 0, 2, ("embed", "block-selective")),
            stage(1, 2, 4, ("block", "block-selective")),
            stage(2, 4, 6, ("block", "block")),
            stage(3, 6, 8, ("block", "head")),
        ),
        step=STEP,
        model_flops=2**49,
        proof=Proof(
            status="time limit",
            bound_us=50_200.0,
            bound_by="compute at the profile's best efficiency",
            num_solved=7,
            num_bounded=1200,
            num_refused=400,
            refusals=(("the parameters alone do not fit", 399), ("no cut into stages fits the memory", 1)),
        ),
        choices=(
            choice(label, 4_000.0, 40, on_front=True),
            choice("pp=2 dp=8 tp=2, 8 microbatches of 1, data shard", 6_500.0, 44, on_front=False),
            choice("pp=4 dp=4 tp=2, 8 microbatches of 1, data shard", 9_000.0, 20, on_front=True),
        ),
    )
