"""One model on several clusters: traced once, one outcome each. The solver is replaced."""

from pathlib import Path

import pytest
from plan.sample import sample_plan

from autoplan import planning
from autoplan.errors import InfeasibleError, InputError, RuleError, Shortfall
from autoplan.plan.plan import Proof

EXAMPLE = str(Path(__file__).parents[1] / "examples" / "nanogpt.py")
SHORTFALL = Shortfall(stage=0, needed_bytes=2, limit_bytes=1, by_cause=(("parameters", 2),), remedies=())


class Solver:
    """Answers by the device: a plan, or what it is told to raise; remembers what it was asked."""

    def __init__(self):
        self.requests, self.graphs, self.errors, self.interrupted = [], [], {}, False

    def solve(self, segmented, cluster, cost, request, profile_digest, progress):
        self.requests.append(request)
        self.graphs.append(segmented)
        progress("solving")
        if cluster.device in self.errors:
            raise self.errors[cluster.device]
        plan = sample_plan()
        if not self.interrupted:
            return plan
        proof = Proof(status="interrupted", bound_us=1.0, bound_by="", num_solved=1, num_bounded=0, num_refused=0)
        return planning.replace(plan, proof=proof)


@pytest.fixture
def solver(monkeypatch):
    made = Solver()
    monkeypatch.setattr(planning, "solve", made.solve)
    return made


@pytest.fixture
def traces(monkeypatch):
    """How often a model was traced."""
    count, trace = [], planning.trace_model
    monkeypatch.setattr(planning, "trace_model", lambda *a, **k: count.append(1) or trace(*a, **k))
    return count


def test_the_model_is_traced_once_for_all_clusters(solver, traces):
    said = []
    clusters = ["8xH100", "2x8xA100-80GB"]
    found = planning.search_clusters(EXAMPLE, clusters=clusters, tp=2, top=3, progress=said.append)
    assert len(traces) == 1
    assert [str(outcome.cluster) for outcome in found] == clusters
    assert all(outcome.plan is not None and not outcome.reason for outcome in found)
    assert solver.graphs[0] is solver.graphs[1]
    assert [request.origin.cluster for request in solver.requests] == clusters
    assert {(request.tp, request.top) for request in solver.requests} == {(2, 3)}
    assert solver.graphs[0].graph.batch_size == 8 * 16  # 8 per device of the largest
    assert said[-1] == "2x8xA100-80GB: solving"


def test_the_origin_says_where_the_model_is(solver, monkeypatch):
    monkeypatch.chdir(Path(EXAMPLE).parent)
    planning.search_source("nanogpt.py:build_model", cluster="8xH100", global_batch=8, pp=1, pins=["a=tp:Shard(0)"])
    origin = solver.requests[0].origin
    assert origin.model == f"{EXAMPLE}:build_model"
    assert (origin.cluster, origin.dtype, origin.seq_len) == ("8xH100", "bf16", None)
    assert origin.options == (("pp", "1"), ("pin", "a=tp:Shard(0)"))


def test_what_does_not_fit_is_a_row_with_its_shortfall(solver):
    solver.errors["L4"] = InfeasibleError("no plan fits", SHORTFALL)
    lean, full = planning.search_clusters(EXAMPLE, clusters=["8xL4", "8xH100"], global_batch=8)
    assert (lean.plan, lean.reason, lean.shortfall) == (None, "no plan fits", SHORTFALL)
    assert full.plan is not None


def test_a_pin_that_cannot_be_on_one_cluster_is_a_row_there(solver):
    solver.errors["L4"] = InputError("tp=16 does not fit")
    lean, full = planning.search_clusters(EXAMPLE, clusters=["8xL4", "8xH100"], global_batch=8)
    assert (lean.plan, lean.reason, lean.shortfall) == (None, "tp=16 does not fit", None)
    assert full.plan is not None
    with pytest.raises(InputError, match="tp=16 does not fit"):
        planning.search_clusters(EXAMPLE, clusters=["8xL4", "4xL4"], global_batch=8)


def test_an_op_without_a_rule_ends_the_comparison(solver):
    solver.errors["L4"] = RuleError("no rule")
    with pytest.raises(RuleError):
        planning.search_clusters(EXAMPLE, clusters=["8xL4", "8xH100"], global_batch=8)


def test_after_an_interrupt_no_further_cluster_is_searched(solver):
    solver.interrupted = True
    first, second = planning.search_clusters(EXAMPLE, clusters=["8xH100", "8xL4"], global_batch=8)
    assert first.plan is not None
    assert second.reason == "not searched: the search before it was interrupted"
    assert len(solver.requests) == 1


def test_cpus_and_gpus_together_need_a_dtype(solver):
    with pytest.raises(InputError, match="choose one with --dtype"):
        planning.search_clusters(EXAMPLE, clusters=["4xcpu", "8xH100"], global_batch=8)
    assert planning.search_clusters(EXAMPLE, clusters=["4xcpu", "8xH100"], global_batch=8, dtype="fp32")


def test_an_unknown_keyword_is_refused_before_tracing(solver, traces):
    with pytest.raises(TypeError, match="no keyword 'pipeline'"):
        planning.search_source(EXAMPLE, cluster="8xH100", pipeline=2)
    assert not traces
