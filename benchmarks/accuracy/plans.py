"""A run -> the plan that it ran: every choice that the table tells, or the reason why it cannot be laid out.

====================  ==============================================================================================
table                 plan
====================  ==============================================================================================
zero0 to zero3        replicate, zero1, zero2, shard; ``shard group=8`` in the notes: over 8 data ranks
recompute             full: full. selective: with fused attention nothing (its backward recomputes by itself)
vp > 1                the interleaved schedule with that many chunks
pp                    layers spread evenly, embedding with the first, head with the last; nanotron: by its own costs
tp                    matrices split by columns and rows, embedding and head by vocabulary, norms whole
sequence_parallel     what crosses between segments is split along the sequence; what is gathered of it is not kept but
                      gathered once more in backward, as Megatron-LM and nanotron (tp_recompute_allgather) do
fp16, bf16            16-bit parameters and gradients, float32 master copy and states; ``fp32 grad``: gradients too
====================  ==============================================================================================
"""

import re
from dataclasses import dataclass
from itertools import accumulate

from families import Shape

from accuracy.rows import Run
from autoplan.plan.plan import DataMode, Precision, Recompute

_LEVELS: dict[str, DataMode] = {
    "zero0": "replicate", "": "replicate", "ddp": "replicate", "zero1": "zero1", "zero2": "zero2", "zero3": "shard",
    "zero1+fsdp": "shard", "fsdp": "shard",
}  # fmt: skip
_COLUMNS = ("attention.qkv", "attention.q", "attention.k", "attention.v", "up", "gate")
_ROWS = ("attention.out", "down")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """A plan, as far as it is not the model's or the cost model's."""

    pp: int
    """Stages that hold something; ranks left empty wait and do nothing."""
    edges: tuple[int, ...]
    """Positions in the chain of segments where stages begin, and its end."""
    data: DataMode
    shards: int
    recompute: Recompute | None
    """None where it was not published."""
    precision: Precision
    sequence: bool


def refusal(run: Run) -> str:
    """Why a run cannot be priced; nothing where it can."""
    sizes = run.sizes
    if not all((sizes.num_layers, sizes.width, sizes.hidden, sizes.num_heads, sizes.seq_len)):
        return "the table does not give the architecture"
    if not (run.num_devices and run.global_batch and run.microbatch):
        return "the table does not give devices, batch or microbatch"
    if "fp8" in run.dtype:
        return "fp8, which the cost model does not price yet"
    if re.search(r"lora|adapter", run.finetune, re.IGNORECASE) or "lora" in run.model.lower():
        return "adapters (LoRA and alike) train few parameters of a model that is not traced here"
    if run.ep > 1:
        return "experts"
    if run.level not in _LEVELS:
        return f"data ranks share by {run.level!r}"
    return _shape_refusal(run) or _batch_refusal(run)


def _shape_refusal(run: Run) -> str:
    sizes = run.sizes
    if sizes.width % sizes.num_heads or sizes.num_heads % sizes.num_kv_heads:
        return "heads do not divide the width"
    if sizes.num_heads % run.tp or sizes.num_kv_heads % run.tp:
        return f"tp={run.tp} would split one of {sizes.num_heads} and {sizes.num_kv_heads} heads"
    if run.chunks > 1 and sizes.num_layers % (run.pp * run.chunks):
        return f"{sizes.num_layers} layers do not divide into pp={run.pp} x {run.chunks} chunks"
    if run.pp > sizes.num_layers:
        return f"pp={run.pp} with {sizes.num_layers} layers"
    return ""


def _batch_refusal(run: Run) -> str:
    if run.num_devices % (run.tp * run.pp * run.cp):
        return "the degrees do not divide the devices"
    if run.global_batch % (run.dp * run.microbatch):
        return "the batch does not divide into microbatches"
    return ""


def plan_of(run: Run, shape: Shape) -> Pinned:
    """The plan of a run that ``refusal`` lets pass."""
    counts = _layers_per_stage(run, shape)
    ranks = run.dp * run.cp
    data = _LEVELS[run.level] if ranks > 1 else "replicate"
    group = re.search(r"shard group=(\d+)|zero1 group=(\d+)", run.notes)
    shards = int(group[1] or group[2]) if group else ranks
    return Pinned(
        pp=len(counts) // run.chunks,
        edges=(0, *(1 + done for done in accumulate(counts[:-1])), shape.num_layers + 2),
        data=data,
        shards=1 if data == "replicate" else min(shards, ranks) if ranks % min(shards, ranks) == 0 else ranks,
        recompute=_recompute(run, shape),
        precision=_precision(run),
        sequence=run.sequence_parallel and run.tp > 1,
    )


def _recompute(run: Run, shape: Shape) -> Recompute | None:
    kept: Recompute = "gather" if run.sequence_parallel and run.tp > 1 else "none"
    match run.recompute:
        case "full":
            return "full"
        case "none":
            return kept
        case "selective":
            return kept if shape.fused_attention else "selective"
        case _:
            return None


def _layers_per_stage(run: Run, shape: Shape) -> list[int]:
    stages, layers = run.pp * run.chunks, shape.num_layers
    if run.source == "nanotron":
        return _by_cost(layers, _layer_weights(shape), shape.vocab_size * shape.width, stages)
    least, more = divmod(layers, stages)
    return [least + (stage < more) for stage in range(stages)]


def _layer_weights(shape: Shape) -> int:
    return 4 * shape.width * shape.width + 3 * shape.hidden * shape.width


def _by_cost(layers: int, layer: int, head: int, stages: int) -> list[int]:
    """Nanotron's own split: a stage is full when the weights so far exceed its share; later ones may stay empty."""
    total = layers * layer + head
    counts, stage, seen = [0] * stages, 0, 0
    for _ in range(layers):
        counts[stage] += 1
        seen += layer
        stage += seen > total * (stage + 1) / stages
    return counts[: stage + 1]


def _precision(run: Run) -> Precision:
    if "true" in run.dtype:
        return Precision()
    wide = "fp32 grad" in run.dtype or "fp32 accum" in run.dtype
    if "amp" in run.dtype:
        return Precision(gradients="float32", reductions="bfloat16", states="float32", master="float32")
    if wide:
        return Precision(gradients="float32", reductions="float32", states="float32", master="float32")
    return Precision(states="float32", master="float32")


def weight_pins(shape: Shape) -> tuple[str, ...]:
    """Where Megatron-LM's tensor parallelism puts every matrix."""
    merged = shape.num_heads == shape.num_kv_heads
    attention = ("attention.qkv",) if merged else ("attention.q", "attention.k", "attention.v")
    columns = [*attention, "up", *(["gate"] if shape.family == "llama" else [])]
    pins = ["head.weight=tp:Shard(0)"]
    if not shape.tied:
        pins.append("tokens.weight=tp:Shard(0)")
    for name in columns:
        place = "Shard(0, blocks=3)" if name == "attention.qkv" else "Shard(0)"
        pins.append(f"layers.*.{name}.weight=tp:{place}")
    pins += [f"layers.*.{name}.weight=tp:Shard(1)" for name in _ROWS]
    return tuple(pins)
