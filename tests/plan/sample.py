"""A hand-built plan with every field in use: a 6-layer GPT with a tied head on 8 H100s, pp 2 x dp 2 x tp 2."""

import math

from autoplan.cluster import Cluster, Mesh
from autoplan.ir import Graph, GraphInput, OpNode, Param, Ref, TensorMeta
from autoplan.plan.plan import (
    Amounts,
    Choice,
    CollectiveCount,
    Layout,
    LayoutCost,
    OpPlacement,
    Origin,
    ParamPlacement,
    Plan,
    Proof,
    RunnerUp,
    Stage,
)
from autoplan.sharding import CollectiveKind, Placement, parse_placement, parse_strategy

NUM_LAYERS = 6
MIB = 2**20

# name: shape, tensor axis, data axis
BLOCK = {
    "ln_1.weight": ((768,), "Replicate(partial_grad)", "Shard(0)"),
    "attn.c_attn.weight": ((2304, 768), "Shard(0, blocks=3)", "Shard(1)"),
    "attn.c_attn.bias": ((2304,), "Shard(0, blocks=3)", "Replicate"),
    "attn.c_proj.weight": ((768, 768), "Shard(1)", "Shard(0)"),
    "mlp.c_fc.weight": ((3072, 768), "Shard(0)", "Shard(1)"),
    "mlp.c_proj.weight": ((768, 3072), "Shard(1)", "Shard(0)"),
}
SHAPES = (
    {"wte.weight": (50304, 768), "wpe.weight": (1024, 768)}
    | {f"h.{i}.{name}": shape for i in range(NUM_LAYERS) for name, (shape, _, _) in BLOCK.items()}
    | {"ln_f.weight": (768,)}
)


def collective(axis: str, kind: str, count: int, num_bytes: int) -> CollectiveCount:
    return CollectiveCount(axis=axis, kind=CollectiveKind(kind), count=count, num_bytes=num_bytes)


def op(node: str, batch: str, tensor: str) -> OpPlacement:
    return OpPlacement(node=node, batch=parse_strategy(batch), tensor=parse_strategy(tensor))


def placements(*texts: str) -> tuple[Placement, ...]:
    return tuple(parse_placement(text) for text in texts)


def params() -> tuple[ParamPlacement, ...]:
    rows = [("wte.weight", "Shard(0)", "Shard(1)"), ("wpe.weight", "Replicate", "Shard(0)")]
    rows += [(f"h.{i}.{name}", tensor, data) for i in range(NUM_LAYERS) for name, (_, tensor, data) in BLOCK.items()]
    rows += [("ln_f.weight", "Replicate(partial_grad)", "Shard(0)")]
    return tuple(
        ParamPlacement(name=name, tensor=parse_placement(tensor), data=parse_placement(data))
        for name, tensor, data in rows
    )


def block(name: str, recompute: str, activation_mib: int, backward_us: float) -> Layout:
    return Layout(
        name=name,
        kind=1,
        recompute=recompute,
        ops=(
            op("layer_norm", "Shard(0), Replicate(partial_grad) -> Shard(0)",
               "Shard(1), Replicate(partial_grad) -> Shard(1)"),
            op("linear", "Shard(0), Replicate(partial_grad), Replicate(partial_grad) -> Shard(0)",
               "Replicate(partial_grad), Shard(0, blocks=3), Shard(0, blocks=3) -> Shard(2, blocks=3)"),
            op("linear_1", "Shard(0), Replicate(partial_grad) -> Shard(0)", "Shard(2), Shard(1) -> Partial"),
            op("mean", "Shard(0) -> Shard(0)", "Shard(0) -> Partial [mean]"),
        ),
        inputs=placements("Shard(1)"),
        outputs=placements("Shard(1)"),
        cost=LayoutCost(
            forward_us=210.5,
            backward_us=backward_us,
            forward_comm_us=41.25,
            backward_comm_us=41.25,
            activation_bytes=activation_mib * MIB,
            transient_bytes=96 * MIB,
            collectives=(
                collective("tp", "all_gather", 4, 4 * 12 * MIB),
                collective("tp", "reduce_scatter", 4, 4 * 12 * MIB),
            ),
        ),
    )  # fmt: skip


def edge(name: str, kind: int, node: str, inputs: tuple[Placement, ...], outputs: tuple[Placement, ...]) -> Layout:
    return Layout(
        name=name,
        kind=kind,
        recompute="none",
        ops=(op(node, "Replicate(partial_grad), Shard(0) -> Shard(0)", "Shard(0), Replicate -> Partial"),),
        inputs=inputs,
        outputs=outputs,
        cost=LayoutCost(
            forward_us=95.0,
            backward_us=180.0,
            forward_comm_us=12.0,
            backward_comm_us=0.0,
            activation_bytes=24 * MIB,
            transient_bytes=192 * MIB,
            collectives=(collective("tp", "all_reduce", 1, 12 * MIB),),
        ),
    )


def memory(parameters: int, activations: int) -> Amounts:
    mib = {
        "parameters": parameters,
        "gradients": parameters,
        "optimizer": 4 * parameters,
        "activations": activations,
        "gathered parameters": parameters // 2,
        "transient": 192,
        "communication buffers": 48,
    }
    return Amounts(by_cause=tuple((cause, amount * MIB) for cause, amount in mib.items()))


def stages() -> tuple[Stage, Stage]:
    shared = (
        collective("tp", "all_gather", 48, 48 * 12 * MIB),
        collective("tp", "reduce_scatter", 48, 48 * 12 * MIB),
        collective("dp", "all_gather", 32, 32 * 9 * MIB),
        collective("dp", "reduce_scatter", 4, 4 * 9 * MIB),
        collective("tied", "all_reduce", 1, 18 * MIB),
        collective("pp", "send", 4, 4 * 6 * MIB),
        collective("pp", "recv", 4, 4 * 6 * MIB),
    )
    return (
        Stage(
            start=0,
            end=5,
            layouts=("embed", "block-selective", "block-selective", "block", "block"),
            forward_us=1210.0,
            backward_us=2480.5,
            memory=memory(260, 1530),
            collectives=shared,
            weight_us=800.25,
        ),
        Stage(
            rank=1,
            start=5,
            end=8,
            layouts=("block", "block", "head"),
            forward_us=1105.0,
            backward_us=2300.0,
            memory=memory(210, 880),
            collectives=(*shared, collective("dp", "all_reduce", 1, 4)),
        ),
    )


def segment_params() -> tuple[tuple[str, ...], ...]:
    blocks = tuple(tuple(f"h.{i}.{name}" for name in BLOCK) for i in range(NUM_LAYERS))
    return (("wte.weight", "wpe.weight"), *blocks, ("ln_f.weight", "wte.weight"))


def graph() -> Graph:
    """A graph with the sample's names: enough to check a plan against, not to run."""
    metas = {name: TensorMeta(shape=shape, dtype="float32") for name, shape in SHAPES.items()}
    activation = TensorMeta(shape=(64, 1024, 768), dtype="float32")
    operands = {"arange": 0, "embedding": 2, "layer_norm": 2, "linear": 3, "linear_1": 2, "mean": 1, "linear_2": 2}
    nodes = tuple(
        OpNode(name=name, op="aten.sample.default", args=(Ref("input:0"),) * count, outputs=(activation,))
        for name, count in operands.items()
    )
    return Graph(
        nodes=nodes,
        params=tuple(Param(name=name, meta=meta) for name, meta in metas.items()),
        constants=(),
        inputs=(
            GraphInput(
                value="input:0", path="ids", meta=TensorMeta(shape=(64, 1024), dtype="int64"), batch_dim=0
            ),
        ),
        outputs=(Ref("mean"),),
        loss="mean",
        batch_size=64,
    )  # fmt: skip


def sample_plan() -> Plan:
    return Plan(
        version="0.1.0",
        model="examples/gpt.py:build_model",
        graph_digest=graph().digest,
        batch_size=64,
        dtype="bfloat16",
        cluster=Cluster(num_nodes=1, devices_per_node=8, device="H100", memory_bytes=76 * 2**30),
        profile_digest="9d1c3fb20a77e4d1",
        mesh=Mesh(axes=("pp", "dp", "cp", "tp"), sizes=(2, 2, 1, 2)),
        schedule="1f1b",
        num_microbatches=4,
        data="shard",
        shards=2,
        kind_names=("embed", "block", "head"),
        segment_kinds=(0, *(1,) * NUM_LAYERS, 2),
        segment_params=segment_params(),
        prelude=(("arange", parse_strategy(" -> Replicate")),),
        inputs=(("input:0", parse_placement("Shard(0)")),),
        params=params(),
        layouts=(
            edge("embed", 0, "embedding", placements("Replicate", "Replicate"), placements("Shard(1)")),
            block("block", "none", 126, 421.0),
            block("block-selective", "selective", 84, 498.75),
            edge("head", 2, "linear_2", placements("Shard(1)"), placements("Replicate")),
        ),
        stages=stages(),
        step=Amounts(
            by_cause=(
                ("compute", 12760.0),
                ("tp communication", 1980.0),
                ("dp communication", 412.5),
                ("pp communication", 96.0),
                ("bubble", 3690.5),
                ("optimizer", 240.0),
            )
        ),
        proof=Proof(
            status="complete",
            bound_us=19100.0,
            bound_by="the stages of every candidate at their fastest",
            num_solved=12,
            num_bounded=230,
            num_refused=31,
            refusals=(("no cut into stages fits the memory", 31),),
        ),
        choices=(
            Choice(
                label="pp=2 dp=2 tp=2, 4 microbatches of 8",
                step=Amounts(by_cause=(("compute", 12760.0), ("bubble", 6419.0))),
                peak_bytes=4 * 2**30,
                on_front=True,
            ),
        ),
        model_flops=2**46,
        peak_flops_per_s=989e12,
        tokens=64 * 1024,
        origin=Origin(model="examples/gpt.py", cluster="8xH100", seq_len=1024, dtype="bf16", options=(("tp", "2"),)),
        runners_up=(
            RunnerUp(
                label="pp=1 dp=4 tp=2, 4 microbatches, recompute none",
                step_us=20480.0,
                reason="1.3 ms more gradient reduction over dp, no bubble",
            ),
            RunnerUp(
                label="pp=1 dp=8 tp=1, 1 microbatch, recompute none",
                step_us=None,
                reason="stage 0 needs 81.2 GiB of 76.0 GiB",
            ),
        ),
        assumptions=(
            ("dtype", "bf16"),
            ("optimizer", "adamw, states in fp32"),
            ("sequence", "1024"),
            ("pinned", "nothing"),
            ("search", "optimal: gap 0.0% to the cost model's bound"),
        ),
    )


def one_device_plan() -> Plan:
    """The smallest plan: one device, one stage, no communication."""
    plan = sample_plan()
    only = Stage(
        start=0,
        end=8,
        layouts=("embed", *("block",) * 6, "head"),
        forward_us=math.pi * 1000,
        backward_us=6000,
        memory=memory(500, 900),
        collectives=(),
    )
    return Plan(
        version=plan.version,
        model=plan.model,
        graph_digest=plan.graph_digest,
        batch_size=64,
        dtype="bfloat16",
        cluster=Cluster(num_nodes=1, devices_per_node=1, device="cpu", memory_bytes=2**33),
        profile_digest=plan.profile_digest,
        mesh=Mesh(axes=("pp", "dp", "cp", "tp"), sizes=(1, 1, 1, 1)),
        schedule="1f1b",
        num_microbatches=1,
        data="replicate",
        kind_names=plan.kind_names,
        segment_kinds=plan.segment_kinds,
        segment_params=plan.segment_params,
        prelude=plan.prelude,
        inputs=plan.inputs,
        params=tuple(ParamPlacement(name=p.name, tensor=parse_placement("Replicate")) for p in plan.params),
        layouts=plan.layouts,
        stages=(only,),
        step=Amounts(by_cause=(("compute", 9141.6),)),
        runners_up=(),
        proof=Proof(
            status="complete",
            bound_us=9141.6,
            bound_by="the only candidate",
            num_solved=1,
            num_bounded=0,
            num_refused=0,
        ),
        assumptions=(),
    )
