"""Priced by the same cost model, the search is never dearer than what experts chose for the same job."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path

import pytest
from expert_plans import ExpertPlan, cost_model, expert_plans

from autoplan.errors import InfeasibleError
from autoplan.ir import SegmentedGraph
from autoplan.plan.file import plan_from_json, plan_to_json
from autoplan.plan.plan import Plan
from autoplan.plan.verify import verify_plan
from autoplan.solver.request import Request
from autoplan.solver.solve import solve
from autoplan.trace.capture import trace_model
from autoplan.trace.inputs import find_batch_dims
from autoplan.trace.segments import segment_graph
from autoplan.trace.source import load_model

PLANS = expert_plans()
AXES = ("pp", "dp", "cp", "tp")
Answer = Plan | InfeasibleError
Searcher = Callable[[ExpertPlan, bool], Answer]
_FOUND = re.compile(r"([\d.]+) ms per step$")


@cache
def segmented(model: str, batch: int, seq_len: int) -> SegmentedGraph:
    """The traced model of a job; plans of one job share it."""
    source = load_model(model, seq_len=seq_len)
    dims = find_batch_dims(source.example_inputs, batch)
    traced = trace_model(source.build(), source.example_inputs(batch), batch_dims=dims, dtype="bfloat16")
    return segment_graph(traced.graph)


@pytest.fixture(scope="module")
def searcher(tmp_path_factory: pytest.TempPathFactory) -> Searcher:
    """Search an expert's job, with the expert's pins or without.

    Without, it is interrupted as soon as a plan is no dearer than the expert's: what follows only gets better.
    """
    folder = tmp_path_factory.mktemp("clusters")
    pinned_plans: dict[str, Answer] = {}

    def search(plan: ExpertPlan, pinned: bool) -> Answer:
        cost = cost_model(plan.cluster, folder)
        request = Request(model=plan.name, dtype="bfloat16", precision=plan.precision)
        if plan.name not in pinned_plans:
            pinned_plans[plan.name] = _solved(plan, cost, replace(request, **dict(plan.pins)))
        theirs = pinned_plans[plan.name]
        if pinned:
            return theirs
        enough_us = theirs.step.total if isinstance(theirs, Plan) else float("inf")
        return _solved(plan, cost, request, enough_us)

    return search


def _solved(plan: ExpertPlan, cost, request: Request, enough_us: float = 0.0) -> Answer:
    sg = segmented(plan.model, plan.global_batch, plan.seq_len)

    def stop_at_enough(message: str) -> None:
        found = _FOUND.search(message)
        if found and float(found[1]) * 1e3 * 1.0001 < enough_us:  # the message has two digits
            raise KeyboardInterrupt

    try:
        answer = solve(sg, cost.cluster, cost, request, profile_digest=cost.profile.digest, progress=stop_at_enough)
    except InfeasibleError as error:
        return error
    verify_plan(answer)
    assert plan_from_json(plan_to_json(answer)) == answer
    assert all(stage.memory.total <= cost.cluster.memory_bytes for stage in answer.stages)
    return answer


@pytest.mark.timeout(900)  # two traces and two searches of the largest models, on a machine that may be busy
@pytest.mark.parametrize("expert", PLANS, ids=lambda plan: plan.name)
def test_the_search_is_never_dearer_than_the_expert(expert: ExpertPlan, searcher: Searcher) -> None:
    theirs, ours = searcher(expert, True), searcher(expert, False)
    assert isinstance(theirs, Plan) == expert.fits, _said(expert, theirs)
    assert isinstance(ours, Plan), f"nothing fits: {ours}"
    if isinstance(theirs, Plan):
        assert ours.step.total <= theirs.step.total, f"{expert.name}: {ours.mesh} against {theirs.mesh}"


@pytest.mark.parametrize("expert", [plan for plan in PLANS if plan.fits], ids=lambda plan: plan.name)
def test_the_rival_is_what_the_expert_chose(expert: ExpertPlan, searcher: Searcher) -> None:
    theirs = searcher(expert, True)
    assert isinstance(theirs, Plan)
    pins = dict(expert.pins)
    assert {axis: theirs.mesh.size(axis) for axis in AXES} == {axis: pins[axis] for axis in AXES}
    assert theirs.batch_size == expert.global_batch
    found = {
        "microbatch": expert.global_batch // theirs.parts,
        "schedule": theirs.schedule,
        "chunks": theirs.chunks,
        "data": theirs.data,
        "ep": theirs.expert,
        "shards": theirs.shards,
    }
    assert {key: value for key, value in found.items() if key in pins} == {
        key: pins[key] for key in found if key in pins
    }
    layouts = {layout.name: layout.recompute for layout in theirs.layouts}
    if "recompute" in pins:
        assert {layouts[name] for stage in theirs.stages for name in stage.layouts} == {pins["recompute"]}


@pytest.mark.parametrize("expert", PLANS, ids=lambda plan: plan.name)
def test_the_data_is_whole(expert: ExpertPlan, tmp_path: Path) -> None:
    pins = dict(expert.pins)
    cluster = cost_model(expert.cluster, tmp_path).cluster
    assert prod(int(pins[axis]) for axis in AXES) == cluster.num_devices
    assert expert.global_batch % (int(pins["dp"]) * int(pins.get("microbatch", 1))) == 0
    assert expert.source and expert.assumed
    assert bool(expert.why) == (not expert.fits)


def test_all_that_was_promised_is_there() -> None:
    names = [plan.name for plan in PLANS]
    assert len(set(names)) == len(names)
    promised = ("megatron-145b", "megatron-310b", "megatron-530b", "megatron-1t", "llama3-405b-8k", "llama3-405b-128k")
    assert {*promised} <= {*names}
    assert {name.rpartition("-")[0] for name in names} >= {"torchtitan-8b", "torchtitan-405b", "mixtral-8x22b"}
    assert any(dict(plan.pins).get("ep", 1) != 1 for plan in PLANS)


def _said(expert: ExpertPlan, answer: Answer) -> str:
    return f"{expert.name} was said {'' if expert.fits else 'not '}to fit, but: {answer}"
