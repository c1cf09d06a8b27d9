"""A Ctrl-C or the time limit in mid-search: the best plan so far comes back marked, and nothing is made up."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from small_models import small_model
from toy_cost import ToyCost

from autoplan.cluster import Cluster
from autoplan.cost import Collective, Work
from autoplan.plan.plan import Plan
from autoplan.plan.verify import verify_plan
from autoplan.solver import search as search_module
from autoplan.solver.request import Request
from autoplan.solver.solve import solve

REQUEST = Request(model="even", dtype="float32", gap=0.0, top=20)
"""Twenty plans, so that the search goes on after the first."""
CLUSTER = Cluster(num_nodes=1, devices_per_node=4, device="toy", memory_bytes=2**25)


@dataclass(kw_only=True)
class Counting:
    """The toy cost model, and a call of it at which something happens."""

    at: int = -1
    happens: Callable[[], None] = lambda: None
    calls: int = field(default=0, init=False)
    toy: ToyCost = ToyCost()

    def _count(self) -> None:
        self.calls += 1
        if self.calls == self.at:
            self.happens()

    def compute_us(self, work: Work) -> float:
        self._count()
        return self.toy.compute_us(work)

    def collective_us(self, collective: Collective) -> float:
        self._count()
        return self.toy.collective_us(collective)

    def overlap_loss(self) -> float:
        return self.toy.overlap_loss()

    def peak_flops_per_s(self, dtype: str) -> float:
        return self.toy.peak_flops_per_s(dtype)

    def host_copy_us(self, num_bytes: int) -> float:
        return self.toy.host_copy_us(num_bytes)


def planned(cost: Counting, told: Callable[[str], None] = lambda _: None) -> Plan:
    return solve(small_model("even"), CLUSTER, cost, REQUEST, "toy", told)


def interrupted() -> None:
    raise KeyboardInterrupt


@pytest.fixture(scope="module")
def whole() -> tuple[Plan, list[int], int]:
    """The undisturbed plan, the calls made whenever a best plan was found, and all calls of the search."""
    cost, found = Counting(), []

    def told(message: str) -> None:
        if message.endswith("per step"):
            found.append(cost.calls)

    plan = planned(cost, told)
    return plan, found, cost.calls


def test_the_search_goes_on_after_the_first_plan(whole: tuple[Plan, list[int], int]) -> None:
    plan, found, calls = whole
    assert plan.proof.status == "complete"
    assert found and found[0] < calls


def test_an_interrupt_before_any_plan_is_raised(whole: tuple[Plan, list[int], int]) -> None:
    _, found, _ = whole
    for at in (1, found[0] // 2, found[0]):
        with pytest.raises(KeyboardInterrupt):
            planned(Counting(at=at, happens=interrupted))


def test_an_interrupt_after_the_first_plan_returns_it(whole: tuple[Plan, list[int], int]) -> None:
    best, found, calls = whole
    for at in (found[0] + 1, (found[0] + calls) // 2):
        plan = planned(Counting(at=at, happens=interrupted))
        verify_plan(plan)
        assert plan.proof.status == "interrupted"
        assert "interrupted: best plan so far" in dict(plan.assumptions)["search"]
        assert plan.step.total >= best.step.total
        assert plan.proof.bound_us <= best.step.total


def test_the_time_limit_after_the_first_plan_returns_it(
    whole: tuple[Plan, list[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    best, found, _ = whole
    cost = Counting(at=found[0] + 1, happens=lambda: monkeypatch.setattr(search_module.time, "monotonic", late))
    now = time.monotonic

    def late() -> float:
        return now() + 2 * REQUEST.time_limit_s

    plan = planned(cost)
    verify_plan(plan)
    assert plan.proof.status == "time limit"
    assert "time limit of 60 s: best plan so far" in dict(plan.assumptions)["search"]
    assert plan.step.total >= best.step.total
    assert plan.proof.bound_us <= best.step.total


def test_the_time_limit_before_any_plan_goes_on_to_the_first(
    whole: tuple[Plan, list[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic
    cost = Counting(
        at=whole[1][0] // 2,
        happens=lambda: monkeypatch.setattr(search_module.time, "monotonic", lambda: now() + 2 * REQUEST.time_limit_s),
    )
    plan = planned(cost)
    assert plan.proof.status == "time limit"
    assert plan.proof.num_solved >= 1
