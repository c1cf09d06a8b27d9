"""Orders against torch's own, what is in flight against a full replay, the closed form against the simulation."""

import itertools
import random
import time
from types import SimpleNamespace

import pytest
import torch.distributed.pipelining as torch_pipelining
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.errors import InputError
from autoplan.plan.plan import SCHEDULES
from autoplan.plan.schedule import (
    Action,
    RankTimes,
    allowed,
    bubble_terms,
    in_flight,
    orders,
    rank_of,
    splits_backward,
    stages_of,
    step_us,
)
from autoplan.plan.simulate import StageTimes, simulate

TORCH = {
    "1f1b": torch_pipelining.Schedule1F1B,
    "interleaved": torch_pipelining.ScheduleInterleaved1F1B,
    "zero-bubble": torch_pipelining.ScheduleInterleavedZeroBubble,
    "zbv": torch_pipelining.ScheduleZBVZeroBubble,
}
NAMES = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "B", "BACKWARD_WEIGHT": "W"}
CHUNKS = {"1f1b": (1,), "interleaved": (2, 3, 4), "zero-bubble": (1, 2, 3), "zbv": (2,)}


class RecordingStage(SimpleNamespace):
    """Stands in for a torch PipelineStage: sends nothing, computes nothing, and writes down what it is asked."""

    def __init__(self, index, num_stages, group_size):
        last = index == num_stages - 1
        super().__init__(stage_index=index, num_stages=num_stages, group_size=group_size, group_rank=0, submod=None)
        self.is_first, self.is_last, self.has_backward, self.device, self.asked = index == 0, last, True, "cpu", []

    def forward_one_chunk(self, microbatch, *_, **__):
        self.asked.append(Action("F", self.stage_index, microbatch))

    def backward_one_chunk(self, microbatch, **_):
        self.asked.append(Action("B", self.stage_index, microbatch))

    def perform_reduce_grad(self, _):
        pass

    def no_ops(self, _):
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = no_ops


def torch_orders(kind, p, v, m):
    """The compute actions of each rank, as torch makes or, for 1F1B, runs them. Raises where torch refuses."""
    if kind == "1f1b":  # its printed order numbers the last rank's forward passes from 1, so it is run instead
        return tuple(run_1f1b(RecordingStage(rank, p, p), m) for rank in range(p))
    schedule = TORCH[kind]([RecordingStage(i * p, p * v, p) for i in range(v)], m)
    return tuple(tuple(map(from_torch, filter(None, schedule.pipeline_order[rank]))) for rank in range(p))


def run_1f1b(stage, m):
    schedule = TORCH["1f1b"](stage, m)
    schedule._initialize_stage = lambda *_: None
    schedule._step_microbatches()
    return tuple(stage.asked)


def from_torch(action):
    return Action(NAMES[action.computation_type.name], action.stage_index, action.microbatch_index)


def accepted(kind, p, v, m):
    try:
        return torch_orders(kind, p, v, m)
    except (ValueError, AssertionError):
        return None


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 8])
def test_orders_and_refusals_are_those_of_torch(kind, p):
    ran = 0
    for v, m in itertools.product(CHUNKS[kind], range(1, 3 * p + 4)):
        expected = accepted(kind, p, v, m)
        assert (allowed(kind, p, v, m) == "") == (expected is not None), (v, m)
        if expected is not None:
            assert orders(kind, p, v, m) == expected, (v, m)
            ran += 1
    assert ran > p


def test_an_action_prints_as_in_torch():
    schedule = TORCH["zbv"]([RecordingStage(0, 4, 2), RecordingStage(3, 4, 2)], 4)
    theirs = [str(action).replace("I", "B") for action in schedule.pipeline_order[0] if action]
    assert [str(action) for action in orders("zbv", 2, 2, 4)[0]] == theirs


@pytest.mark.parametrize(
    ("kind", "p", "v", "m", "words"),
    [
        ("1f1b", 4, 2, 8, "one stage per rank"),
        ("1f1b", 4, 1, 3, "each of 4 ranks, found 3"),
        ("interleaved", 4, 1, 8, "several stages"),
        ("interleaved", 4, 2, 9, "9 microbatches do not make 2 equal rounds on 4 ranks"),
        ("zero-bubble", 3, 1, 7, "7 microbatches do not make 2"),
        ("zbv", 4, 1, 8, "two stages"),
        ("zbv", 0, 2, 8, "there must be a rank"),
    ],
)
def test_what_cannot_be_says_why(kind, p, v, m, words):
    assert words in allowed(kind, p, v, m)
    with pytest.raises(InputError, match=f"no {kind} schedule: "):
        orders(kind, p, v, m)


def some_schedules(limit=10):
    for kind, p in itertools.product(SCHEDULES, (1, 2, 3, 4, 6)):
        for v, m in itertools.product(CHUNKS[kind], range(1, limit * p + 2)):
            if not allowed(kind, p, v, m):
                yield kind, p, v, m


def test_every_stage_has_one_rank_which_lists_it():
    for kind, p, v, _ in some_schedules(1):
        held = [stages_of(kind, p, v, rank) for rank in range(p)]
        assert sorted(itertools.chain(*held)) == list(range(p * v))
        assert all(rank_of(kind, p, v, stage) == rank for rank in range(p) for stage in held[rank])
        assert all(tuple(sorted(stages)) == stages for stages in held)


def test_every_pass_runs_once_and_forward_before_backward_before_weights():
    for kind, p, v, m in some_schedules(4):
        whats = "FBW" if splits_backward(kind) else "FB"
        for rank, actions in enumerate(orders(kind, p, v, m)):
            place = {action: i for i, action in enumerate(actions)}
            assert len(actions) == len(place) == len(whats) * v * m
            for stage, microbatch in itertools.product(stages_of(kind, p, v, rank), range(m)):
                at = [place[Action(what, stage, microbatch)] for what in whats]
                assert at == sorted(at)


def replayed(kind, p, v, m, rank):
    """Every vector of live microbatches after a forward pass, by the whole order."""
    stages, last = stages_of(kind, p, v, rank), "W" if splits_backward(kind) else "B"
    counts, seen = [0] * v, set()
    for action in orders(kind, p, v, m)[rank]:
        if action.what == "F":
            counts[stages.index(action.stage)] += 1
            seen.add(tuple(counts))
        elif action.what == last:
            counts[stages.index(action.stage)] -= 1
    assert not any(counts)
    return seen


def test_in_flight_bounds_any_activations_as_the_whole_replay_does():
    rng = random.Random(7)
    for kind, p, v, m in some_schedules():
        for rank in {0, p // 2, p - 1}:
            every, few = replayed(kind, p, v, m, rank), in_flight(kind, p, v, m, rank)
            assert set(few) <= every
            assert not any(a != b and all(x <= y for x, y in zip(a, b, strict=True)) for a in few for b in every)
            sizes = [[1] * v, *([int(i == chunk) for i in range(v)] for chunk in range(v))]
            for size in [*sizes, *([rng.choice((0, 1, rng.randint(1, 99))) for _ in range(v)] for _ in range(6))]:
                most = [max(sum(n * s for n, s in zip(c, size, strict=True)) for c in found) for found in (every, few)]
                assert most[0] == most[1], (kind, p, v, m, rank, size)


def test_in_flight_leaves_out_what_no_sizes_need():
    for rank in range(4):
        assert in_flight("1f1b", 4, 1, 100, rank) == ((4 - rank,),)
        assert in_flight("zero-bubble", 4, 1, 100, rank) == ((4,),)
    assert in_flight("interleaved", 4, 2, 100, 0) == ((7, 4), (8, 3))
    assert in_flight("zbv", 4, 2, 100, 0) == ((7, 1), (8, 0))
    assert max(len(in_flight("interleaved", 16, 8, 512, rank)) for rank in range(16)) <= 16


def test_in_flight_takes_no_longer_for_more_microbatches():
    def seconds(m):
        start = time.process_time()
        for rank in range(32):
            in_flight("interleaved", 32, 5, m, rank)
        return time.process_time() - start

    first = seconds(32 * 4)
    assert seconds(32 * 4000) < max(0.05, first)
    assert in_flight("zbv", 3, 2, 10**9, 1) == in_flight("zbv", 3, 2, 6, 1)


PART = st.integers(0, 40)


def even(kind, p, v, m, forward, inputs, weight):
    """Simulated and closed-form step of even stages, and the same by one term alone."""
    stage = StageTimes(forward_us=forward, input_us=inputs, weight_us=weight)
    ranks = [RankTimes(forward * v, inputs * v, weight * v)] * p
    bubble, total = bubble_terms(kind, p, v), (forward + inputs + weight) * v
    one = m * total + max(0, bubble.share * ((p - 1) * total - bubble.weight * (p - 1) * weight * v))
    return simulate(kind, p, v, m, [stage] * (p * v)).makespan_us, step_us(kind, p, v, m, ranks), one


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(SCHEDULES), st.integers(1, 7), st.integers(0, 2), st.integers(1, 4), st.tuples(PART, PART, PART))
def test_the_closed_form_is_the_simulation_on_even_ranks(kind, p, more, rounds, parts):
    v, m = CHUNKS[kind][more % len(CHUNKS[kind])], rounds * p
    if kind == "zbv":
        m += p - 1
    simulated, closed, one = even(kind, p, v, m, *parts)
    assert closed == pytest.approx(simulated)
    forward, inputs, weight = parts
    if kind != "zbv" and (kind != "zero-bubble" or weight <= min(forward, inputs)):
        assert one == pytest.approx(simulated)


# One mix of parts for each row of the form, which is the largest there alone.
ROWS = {
    "zero-bubble": [(3, 3, 1), (3, 1, 2), (1, 3, 4)],
    "zbv": [(4, 7, 3), (4, 7, 6), (9, 5, 1), (9, 1, 3), (8, 4, 8), (9, 8, 2), (2, 7, 10), (4, 3, 6)],
}


@pytest.mark.parametrize(("kind", "v"), [("zero-bubble", 1), ("zero-bubble", 3), ("zbv", 2)])
@pytest.mark.parametrize("p", [4, 6])
def test_every_row_of_the_closed_form_is_the_longest_for_some_times(kind, v, p):
    rows = bubble_terms(kind, p, v).rows
    longest = set()
    for parts in ROWS[kind]:
        simulated, closed, _ = even(kind, p, v, 2 * p, *parts)
        assert closed == pytest.approx(simulated)
        hidden = [sum(h * part for h, part in zip(row, parts, strict=True)) for row in rows]
        longest |= {i for i, h in enumerate(hidden) if h < min(hidden[:i] + hidden[i + 1 :]) - 1e-9}
    assert longest == set(range(len(rows)))


@pytest.mark.parametrize("m", [5, 6, 7, 10, 15])
@pytest.mark.parametrize(("kind", "v"), [("1f1b", 1), ("interleaved", 3), ("zero-bubble", 2)])
def test_the_closed_form_holds_when_rounds_are_longer_than_the_ranks(kind, v, m):
    assert allowed(kind, 4, v, m) == ""
    simulated, closed, _ = even(kind, 4, v, m, 10, 17, 8)
    assert closed == pytest.approx(simulated)


@pytest.mark.parametrize("parts", [(1, 1, 1), (2, 3, 2), (10, 14, 8), (10, 20, 10), (1, 1, 0.5)])
@pytest.mark.parametrize("p", [2, 4, 8, 16])
@pytest.mark.parametrize("times", [2, 4])
def test_one_term_is_within_five_percent_for_zbv(parts, p, times):
    simulated, _, one = even("zbv", p, 2, times * p, *parts)
    assert one == pytest.approx(simulated, rel=0.05)


@pytest.mark.parametrize(("kind", "v", "saved"), [("zero-bubble", 1, 2), ("zbv", 2, 2), ("interleaved", 2, 1.5)])
def test_better_schedules_have_smaller_bubbles(kind, v, saved):
    """At equal parts ZB-H1 waits a third of what 1F1B waits; ZB-V a sixth, the start of the last rank."""
    plain, _, _ = even("1f1b", 8, 1, 16, 6, 6, 6)
    better, _, _ = even(kind, 8, v, 16, 6 / v, 6 / v, 6 / v)
    work = 16 * 18
    assert (plain - work) / (better - work) >= saved


def uneven(rng, kind, p, v, spread):
    parts = (1, rng.uniform(1, 2), rng.uniform(0.5, 1))
    stages = []
    for _ in range(p * v):
        scale = 1 + spread * rng.uniform(-1, 1)
        forward, inputs, weight = (part * scale for part in parts)
        stages.append(StageTimes(forward_us=forward, input_us=inputs, weight_us=weight))
    ranks = []
    for rank in range(p):
        held = [stages[s] for s in stages_of(kind, p, v, rank)]
        ranks.append(
            RankTimes(sum(s.forward_us for s in held), sum(s.input_us for s in held), sum(s.weight_us for s in held))
        )
    return stages, ranks


# Least and most of closed form / simulation - 1. With parts in one proportion it is an upper bound for 1F1B alone.
UNEVEN = {
    ("1f1b", 1): (0.0, 0.12),
    ("interleaved", 2): (-0.08, 0.13),
    ("interleaved", 4): (-0.10, 0.06),
    ("zero-bubble", 1): (-0.02, 0.08),
    ("zero-bubble", 2): (-0.10, 0.04),
    ("zbv", 2): (-0.04, 0.10),
}


@pytest.mark.parametrize(("kind", "v"), UNEVEN)
def test_how_far_the_closed_form_is_off_on_stages_that_differ_by_a_third(kind, v):
    rng, off = random.Random(3), []
    for p, times in itertools.product((2, 4, 8), (2, 4)):
        for _ in range(12):
            m = times * p
            stages, ranks = uneven(rng, kind, p, v, 0.3)
            off.append(step_us(kind, p, v, m, ranks) / simulate(kind, p, v, m, stages).makespan_us - 1)
    least, most = UNEVEN[kind, v]
    assert least - 1e-9 <= min(off)
    assert max(off) <= most
