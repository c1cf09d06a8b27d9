"""From times to numbers: what made the times comes out again, and noise never contradicts what a search rests on."""

from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.cost import Call
from autoplan.cost_models.measured import CollectiveTimes, smooth
from autoplan.ir import TensorMeta
from autoplan.profiler import fit
from autoplan.profiler.cases import (
    Case,
    Dispatch,
    Matmul,
    OpCase,
    Stream,
    Transfer,
    compute_cases,
    overlap_cases,
    transfer_cases,
)
from autoplan.profiler.consistent import consistent
from autoplan.sharding import CollectiveKind


def test_the_numbers_that_made_the_times_come_out_again() -> None:
    cases: list[Case] = [Dispatch()]
    cases += [Matmul(m=n, n=n, k=n, dtype="float32") for n in (16, 64, 256, 1024, 4096)]
    cases += [Stream(op="add", num_bytes=2**n, dtype="float32") for n in (12, 16, 20, 24)]
    known: dict[str, float | None] = {}
    for case in cases:
        match case:
            case Matmul():
                known[case.key] = 5.0 + (case.flops + 2e6) / 5e4
            case Stream():
                known[case.key] = 5.0 + (case.num_bytes + 1e4) / 2e4
            case _:
                known[case.key] = 5.0
    found = fit.numbers(cases, known)
    peak = found["compute.peak_fp32_tflops"] * found["compute.matmul_efficiency"]
    assert peak == pytest.approx(0.05, rel=0.02)
    assert found["compute.matmul_half_mflop"] == pytest.approx(2, rel=0.1)
    assert found["compute.launch_us"] == 5.0
    assert found["compute.bandwidth_gb_per_s"] * found["compute.memory_efficiency"] == pytest.approx(20, rel=0.02)
    assert found["compute.memory_half_mb"] == pytest.approx(0.01, rel=0.05)


def test_nothing_measured_is_nothing_found() -> None:
    cases = [*compute_cases("cuda", False), *transfer_cases(4, 2, False)]
    assert fit.numbers(cases, {}) == {}
    assert fit.numbers(cases, {case.key: None for case in cases}) == {}
    assert list(fit.collective_points(cases, {})) == []


def test_links_follow_from_messages_and_sums() -> None:
    cases = list(transfer_cases(2, 2, False))
    twice = CollectiveKind.ALL_REDUCE
    known = {case.key: 80.0 + case.num_bytes * (2 if case.kind is twice else 1) / 1e3 for case in cases}
    found = fit.numbers(cases, known)
    assert found["links.node.bandwidth_gb_per_s"] == pytest.approx(1.0)
    assert found["links.node.latency_us"] + found["collectives.launch_us"] == pytest.approx(80)
    assert found["links.node.efficiency"] == pytest.approx(0.5)


def test_a_collective_inside_compute_is_never_faster_than_alone() -> None:
    cases = [
        Transfer(kind=CollectiveKind.SEND, num_bytes=size, ranks=2, per_node=2, inside=inside)
        for size, inside in product((10, 100), (False, True))
    ]
    known = {case.key: 1.0 if case.inside else 3.0 for case in cases}
    (points,) = fit.collective_points(cases, known)
    assert points.us == (3.0, 3.0) and points.alone_us == (3.0, 3.0)


@pytest.mark.parametrize(("both", "loss"), [(10.0, 0.01), (12.0, 0.5), (14.0, 0.99), (99.0, 0.99)])
def test_what_compute_and_a_collective_take_from_each_other(both: float, loss: float) -> None:
    """Beside each other they take from as long as the longer one to as long as one after the other."""
    cases = list(overlap_cases("cpu", 4, 4, False))
    known: dict[str, float | None] = {
        case.key: {"transfer": 4.0, "compute": 10.0, "both": both}[case.part] for case in cases
    }
    assert fit.numbers(cases, known) == {"collectives.overlap_loss": pytest.approx(loss)}
    known[cases[0].key] = None
    assert fit.numbers(cases, known) == {"collectives.overlap_loss": pytest.approx(loss)}
    assert fit.numbers(cases[:3], known) == {}


POINTS = st.dictionaries(st.integers(1, 10**9), st.floats(0.1, 1e6), min_size=1, max_size=8)


@given(POINTS, st.integers(0, 2 * 10**9))
def test_half_the_bytes_take_at_least_half_as_long(points: dict[int, float], size: int) -> None:
    """Whatever was measured: also between the sizes, below and above them."""
    num_bytes, us = smooth(points)
    curve = CollectiveTimes(kind=CollectiveKind.SEND, ranks=2, per_node=2, num_bytes=num_bytes, us=us)
    whole, half = curve.time_us(size), curve.time_us(size // 2)
    assert half <= whole * (1 + 1e-9)
    assert size < 2 or 2 * half >= whole * (1 - 1e-6) * (size // 2 * 2) / size
    assert all(curve.time_us(n) <= points[n] * (1 + 1e-9) for n in points)
    assert curve.time_us(0) == 0


def op(rows: int, columns: int, backward: bool = False) -> OpCase:
    shape = TensorMeta(shape=(rows, columns), dtype="float32")
    call = Call(op="aten.gelu.default", args=(), kwargs=(), operands=(shape,), needs=(True,) * backward)
    return OpCase(call=call, flops=rows * columns, num_bytes=8 * rows * columns)


@given(st.lists(st.floats(1.0, 1e4), min_size=9, max_size=9))
def test_times_of_an_op_do_not_contradict_each_other(times: list[float]) -> None:
    cases = [op(rows, columns) for rows, columns in product((1, 2, 4), (1, 2, 4))]
    found = consistent(list(zip(cases, times, strict=True)))
    for small, large in product(cases, cases):
        (a, b), (c, d) = small.call.operands[0].shape, large.call.operands[0].shape
        if a <= c and b <= d:
            mine, theirs = found[str(small.call)], found[str(large.call)]
            assert theirs * a * b / (c * d) <= mine * (1 + 1e-6)
            assert mine <= theirs * (1 + 1e-6)
    assert all(found[str(case.call)] <= us for case, us in zip(cases, times, strict=True))


def test_consistent_times_stay_and_directions_are_apart() -> None:
    timed = [(op(1, 1), 3.0), (op(2, 1), 4.0), (op(4, 1), 8.0), (op(4, 1, backward=True), 1.0)]
    assert consistent(timed) == {str(case.call): us for case, us in timed}


def test_a_line_is_fitted_to_relative_errors_and_never_falls() -> None:
    line = fit.fit_line([(1, 11.0), (10, 20.0), (1000, 1010.0)])
    assert (line.start_us, line.us_per_unit) == (pytest.approx(10), pytest.approx(1))
    assert fit.fit_line([(1, 9.0), (2, 5.0), (4, 5.0)]).us_per_unit > 0
    assert fit.fit_line([(4, 8.0)]).us_per_unit == 2


def test_keys_tell_cases_apart_and_groups_cover_the_ranks() -> None:
    cases: list[Case] = [*compute_cases("cpu", False), *compute_cases("cuda", False), *transfer_cases(8, 4, False)]
    cases += [*overlap_cases("cpu", 8, 4, False), *overlap_cases("cuda", 8, 4, False)]
    keys = {case.key: case for case in cases}
    assert all(keys[case.key] == case for case in cases)
    assert all(a.key != b.key for a, b in pairwise(compute_cases("cpu", True)))
