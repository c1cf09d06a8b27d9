"""A plan is checked against the model and the number of ranks before anything runs."""

import dataclasses
import re

import pytest
from plan.sample import graph, sample_plan

from autoplan.errors import PlanError
from autoplan.ir import Graph, Param, TensorMeta
from autoplan.plan.plan import Amounts, ParamPlacement
from autoplan.plan.verify import verify_plan, verify_plan_for
from autoplan.sharding import REPLICATE, Shard, parse_strategy


def test_the_sample_fits_its_graph():
    verify_plan(sample_plan())
    verify_plan_for(sample_plan(), graph(), 8)


def other_graph(**changes) -> Graph:
    return dataclasses.replace(graph(), **changes)


def test_another_model_is_refused_with_both_fingerprints():
    more = Param(name="extra.weight", meta=TensorMeta(shape=(4,), dtype="float32"))
    other = other_graph(params=(*graph().params, more))
    with pytest.raises(PlanError, match="search again") as caught:
        verify_plan_for(sample_plan(), other)
    message = str(caught.value)
    assert "examples/gpt.py:build_model" in message
    assert graph().digest in message
    assert other.digest in message
    assert "its parameter 'extra.weight' is not in the plan" in message


def test_other_shapes_are_refused():
    params = tuple(dataclasses.replace(p, meta=TensorMeta(shape=(4,), dtype="float32")) for p in graph().params)
    with pytest.raises(PlanError, match="its shapes, its inputs or its code differ"):
        verify_plan_for(sample_plan(), other_graph(params=params))


def test_another_batch_is_named():
    with pytest.raises(PlanError, match="global batch of 64, this run passes 32.*--global-batch 32"):
        verify_plan_for(sample_plan(), other_graph(batch_size=32))


def test_another_world_size_is_named_with_the_command():
    message = r"needs 8 ranks \(pp 2 x dp 2 x cp 1 x tp 2\), this run has 2: .*torchrun --nproc-per-node 8.*ter of 2"
    with pytest.raises(PlanError, match=message):
        verify_plan_for(sample_plan(), graph(), 2)


def change_param(name, **changes):
    plan = sample_plan()
    params = tuple(dataclasses.replace(p, **changes) if p.name == name else p for p in plan.params)
    return dataclasses.replace(plan, params=params)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: change_param("ln_f.weight", tensor=Shard(1)), 'parameters["ln_f.weight"].tp: Shard(1) needs a dim 1'),
        (lambda: change_param("wte.weight", tensor=Shard(1, 5), data=Shard(0)), "within each of 5 blocks"),
        (
            lambda: dataclasses.replace(
                sample_plan(), params=(*sample_plan().params, ParamPlacement(name="x", tensor=REPLICATE))
            ),
            'parameters["x"]: the model has no such parameter',
        ),
        (
            lambda: dataclasses.replace(sample_plan(), prelude=(("gone", parse_strategy(" -> Replicate")),)),
            'prelude["gone"]: the model has no such op',
        ),
        (
            lambda: dataclasses.replace(sample_plan(), prelude=(("mean", parse_strategy(" -> Replicate")),)),
            "expected 1 placements before the arrow",
        ),
        (lambda: dataclasses.replace(sample_plan(), inputs=()), "inputs: expected input:0, found"),
    ],
)
def test_an_edited_plan_that_the_model_cannot_follow(make, message):
    with pytest.raises(PlanError, match=re.escape(message)):
        verify_plan_for(make(), graph())


def test_amounts_must_be_finite():
    plan = dataclasses.replace(sample_plan(), step=Amounts(by_cause=(("compute", float("nan")),)))
    with pytest.raises(PlanError, match="expected a finite number"):
        verify_plan(plan)
