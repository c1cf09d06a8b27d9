"""The fewest devices on which a job fits: by brute force over all counts, and what it says about the count below."""

from dataclasses import replace

import pytest
from test_reprice import REQUEST, cluster, traced
from toy_cost import ToyCost

from autoplan.errors import InfeasibleError
from autoplan.plan.outcome import Least, Tried
from autoplan.report.least import least_text
from autoplan.solver.devices import least_devices, sizes
from autoplan.solver.solve import solve

MIB = 2**20


def least(memory_bytes: int, per_node: int = 4, **pins: object) -> Least:
    where = cluster(devices=per_node, memory_bytes=memory_bytes)
    return least_devices(traced("llama", 12), where, ToyCost(), replace(REQUEST, **pins), lambda _: None)


def fits(memory_bytes: int, count: int, per_node: int, **pins: object) -> bool:
    where = cluster(min(count, per_node), max(1, count // per_node), memory_bytes)
    try:
        solve(traced("llama", 12), where, ToyCost(), replace(REQUEST, **pins), "toy")
    except (InfeasibleError, ValueError):
        return False
    return True


@pytest.mark.parametrize("pins", [{}, {"tp": 1, "pp": 1}, {"recompute": "none", "microbatch": 1}], ids=str)
@pytest.mark.parametrize("share", [1.5, 0.7, 0.3])
def test_it_is_the_fewest_of_all_counts(share, pins):
    alone = solve(traced("llama", 12), cluster(1), ToyCost(), REQUEST, "toy").stages[0].memory
    states = sum(amount for cause, amount in alone if cause in ("parameters", "gradients", "optimizer states"))
    limit = int(states * share)
    counts = [1, 2, 3, 4, 8, 12, 16]
    by_hand = next((count for count in counts if fits(limit, count, 4, **pins)), None)
    if by_hand is None:
        with pytest.raises(InfeasibleError, match="no number of devices fits"):
            least(limit, **pins)
        return
    found = least(limit, **pins)
    assert found.cluster.num_devices == by_hand
    assert by_hand == 3 or (share, pins) != (0.7, {"tp": 1, "pp": 1}), "the one that halving must find"
    assert [each.fits for each in found.tried] == [False] * (len(found.tried) - 1) + [True]
    if by_hand > 1:
        assert found.limiter is not None
        assert found.limiter.cluster.num_devices < by_hand
        assert found.limiter.shortfall is not None or found.limiter.reason


def test_sizes_double_inside_a_node_and_then_by_nodes():
    found = [(c.num_nodes, c.devices_per_node) for c, _ in zip(sizes(cluster(6)), range(6), strict=False)]
    assert found == [(1, 1), (1, 2), (1, 4), (1, 6), (2, 6), (4, 6)]


def test_what_is_short_below_is_named_by_cause():
    found = least(3 * MIB)
    assert found.limiter is not None and found.limiter.shortfall is not None
    assert found.limiter.shortfall.missing_bytes > 0
    text = least_text(found)
    assert f"The fewest devices on which it fits: {found.cluster.num_devices} devices ({found.cluster})" in text
    assert "is short by" in text
    assert max(map(len, text.splitlines())) <= 120


def test_no_number_of_devices_is_said_so_with_the_shortfall():
    words = "no number of devices fits.*still short by.*more devices do not help"
    with pytest.raises(InfeasibleError, match=words) as caught:
        least(2**14)
    assert caught.value.shortfall is not None
    reason = "p" * 200
    tried = (Tried(cluster=cluster(1), fits=False, reason=reason), Tried(cluster=cluster(2), fits=True))
    assert max(map(len, least_text(Least(cluster=cluster(2), tried=tried)).splitlines())) <= 120
