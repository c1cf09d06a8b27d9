"""What differs between two plans: each change of a plan is told in its section, and nothing else is."""

import dataclasses

import pytest
from plan.sample import collective, one_device_plan, sample_plan
from plan.wide_sample import wide_plan

from autoplan.plan.diff import diff_plans, different_jobs
from autoplan.plan.plan import Amounts, Plan, Precision
from autoplan.sharding import REPLICATE, parse_strategy

PLAN = sample_plan()


def changed(**changes) -> Plan:
    return dataclasses.replace(PLAN, **changes)


def told(right: Plan, left: Plan = PLAN) -> list[tuple[str, str, str, str]]:
    return [(row.section, row.name, row.left, row.right) for row in diff_plans(left, right)]


def with_stage(index: int, **changes) -> Plan:
    stages = list(PLAN.stages)
    stages[index] = dataclasses.replace(stages[index], **changes)
    return changed(stages=tuple(stages))


@pytest.mark.parametrize("make", [sample_plan, one_device_plan, wide_plan])
def test_a_plan_is_like_itself(make):
    assert diff_plans(make(), make()) == ()


def test_every_field_is_seen():
    """No plan that differs in any field passes as alike."""
    other, wide = one_device_plan(), wide_plan()
    for field in dataclasses.fields(Plan):
        values = (getattr(plan, field.name) for plan in (other, wide))
        for value in values:
            if value != getattr(PLAN, field.name) and field.name not in ("mesh", "stages", "layouts", "segment_kinds"):
                assert told(changed(**{field.name: value})), field.name
    assert told(changed(runners_up=())) == [("part of the file", "runners_up", "as here", "other")]


def test_jobs_that_differ_are_named():
    assert different_jobs(PLAN, changed(step=Amounts(by_cause=()))) == ()
    cluster = dataclasses.replace(PLAN.cluster, device="A100-80GB")
    assert different_jobs(PLAN, changed(cluster=cluster, batch_size=128, graph_digest="0")) == (
        "model", "cluster", "batch",
    )  # fmt: skip
    assert ("job", "cluster", "8xH100", "8xA100-80GB") in told(changed(cluster=cluster))


def test_choices():
    assert told(changed(data="zero1")) == [
        ("choice", "data", "shard over 2 of 2 data ranks", "zero1 over 2 of 2 data ranks")
    ]
    assert told(changed(shards=1))[0][3] == "shard over 1 of 2 data ranks"
    assert told(changed(offload=True)) == [("choice", "offload", "-", "optimizer states in host memory")]
    assert told(changed(precision=Precision(master="float32")))[0][1] == "precision"
    assert told(changed(schedule="zero-bubble", chunks=2))[0] == ("choice", "schedule", "1f1b", "zero-bubble, 2 chunks")
    assert told(changed(num_microbatches=8)) == [
        ("choice", "batch", "64 samples = dp 2 x 4 microbatches of 8", "64 samples = dp 2 x 8 microbatches of 4")
    ]


def test_cuts_show_the_layers_of_the_stages():
    first, last = PLAN.stages
    stages = (
        dataclasses.replace(first, end=4, layouts=first.layouts[:4]),
        dataclasses.replace(last, start=4, layouts=("block", *last.layouts)),
    )
    assert told(changed(stages=stages)) == [
        ("stage", "stage 0", "embed, block 0-3", "embed, block 0-2"),
        ("stage", "stage 1", "block 4-5, head", "block 3-5, head"),
    ]


def test_recompute_and_ops_are_told_by_the_layers_they_are_for():
    right = with_stage(0, layouts=("embed", "block-selective", "block", "block-selective", "block"))
    assert told(right) == [
        ("recompute", "block 1", "selective", "none"),
        ("recompute", "block 2", "none", "selective"),
    ]
    whole = parse_strategy("Replicate, Replicate, Replicate -> Replicate")
    layouts = tuple(
        dataclasses.replace(layout, ops=tuple(
            dataclasses.replace(op, tensor=whole) if op.node == "linear" else op for op in layout.ops
        ))
        for layout in PLAN.layouts
    )  # fmt: skip
    [(section, name, left, right_text)] = told(changed(layouts=layouts))
    assert (section, name) == ("op", "block 0-5: linear")
    assert left.startswith("tp: Replicate(partial_grad), Shard(0, blocks=3)")
    assert right_text.startswith(f"tp: {whole};")


def test_weights_are_folded_over_the_layers_that_differ_alike():
    def held(names):
        return changed(params=tuple(
            dataclasses.replace(p, tensor=REPLICATE) if p.name in names else p for p in PLAN.params
        ))  # fmt: skip

    some = {"h.1.mlp.c_fc.weight", "h.2.mlp.c_fc.weight"}
    assert told(held(some)) == [("weight", "h.*.mlp.c_fc.weight, layers 1-2", "tp: Shard(0)", "tp: Replicate")]
    every = {f"h.{i}.mlp.c_fc.weight" for i in range(6)}
    assert told(held(every)) == [("weight", "h.*.mlp.c_fc.weight", "tp: Shard(0)", "tp: Replicate")]
    assert told(held({"wte.weight"})) == [("weight", "wte.weight", "tp: Shard(0)", "tp: Replicate")]
    gone = changed(params=PLAN.params[:-1])
    assert told(gone) == [("weight", "ln_f.weight", "tp: Replicate(partial_grad); dp: Shard(0); ep: Replicate",
                           "weight: absent")]  # fmt: skip


def test_time_and_memory_by_cause_with_the_change():
    causes = tuple((cause, 2 * amount if cause == "bubble" else amount) for cause, amount in PLAN.step)
    rows = [row for row in diff_plans(PLAN, changed(step=Amounts(by_cause=causes))) if row.section == "time"]
    assert [row.name for row in rows] == ["bubble", "total"]
    assert rows[0].change == pytest.approx(1)
    assert rows[1].change == pytest.approx(3690.5 / 19179)

    memory = Amounts(by_cause=tuple((cause, amount + (cause == "transient") * 2**20) for cause, amount in
                                    PLAN.stages[1].memory))  # fmt: skip
    assert told(with_stage(1, memory=memory)) == [
        ("memory", "stage 1: transient", "192 MiB", "193 MiB"),
        ("memory", "stage 1: total", "2.43 GiB", "2.43 GiB"),
    ]


def test_collectives_add_up_over_the_stages():
    right = with_stage(0, collectives=(*PLAN.stages[0].collectives, collective("tp", "all_gather", 4, 2**30)))
    assert told(right) == [("collective", "tp all_gather", "96, 1.12 GiB", "100, 2.12 GiB")]


def test_proof_and_assumptions():
    proof = dataclasses.replace(PLAN.proof, bound_us=PLAN.step.total)
    assert [row[:2] for row in told(changed(proof=proof))] == [("proof", "answer")]
    right = changed(assumptions=(*PLAN.assumptions[1:], ("note", "a"), ("note", "b")))
    assert told(right) == [("assumption", "dtype", "bf16", "-"), ("assumption", "note", "-", "a; b")]
