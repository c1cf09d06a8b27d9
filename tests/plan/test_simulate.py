"""A step played through: exact small cases, and what holds for every schedule and all times."""

import dataclasses
import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.errors import InputError
from autoplan.plan.plan import SCHEDULES
from autoplan.plan.schedule import Action, allowed, in_flight, orders, rank_of, splits_backward, stages_of
from autoplan.plan.simulate import Level, Span, StageTimes, play, simulate

CHUNKS = {"1f1b": (1,), "interleaved": (2, 3), "zero-bubble": (1, 2), "zbv": (2,)}
PARTS = ("forward_us", "input_us", "weight_us", "send_forward_us", "send_backward_us")
TIME = st.integers(0, 12)


@st.composite
def cases(draw):
    """A schedule that exists, and times for its stages."""
    kind = draw(st.sampled_from(SCHEDULES))
    p, v = draw(st.integers(1, 5)), draw(st.sampled_from(CHUNKS[kind]))
    m = draw(st.sampled_from([m for m in range(1, 3 * p + 1) if not allowed(kind, p, v, m)]))
    values = st.fixed_dictionaries({**dict.fromkeys(PARTS, TIME), "activation_bytes": TIME})
    stages = [StageTimes(**draw(values)) for _ in range(p * v)]
    return kind, p, v, m, stages


def durations(kind, p, v, stages):
    """Time of F, B and W of a stage on its rank, stated a second time."""
    found = []
    for k, times in enumerate(stages):
        rank = rank_of(kind, p, v, k)
        forward, inputs, weight = times.forward_us, times.input_us, times.weight_us
        if k + 1 < len(stages) and rank_of(kind, p, v, k + 1) != rank:
            forward += times.send_forward_us
        if k and rank_of(kind, p, v, k - 1) != rank:
            inputs += times.send_backward_us
        found.append({"F": forward, "B": inputs, "W": weight})
        if not splits_backward(kind):
            found[-1] = {"F": forward, "B": inputs + weight}
    return found


@settings(max_examples=200, deadline=None)
@given(cases())
def test_every_action_starts_as_soon_as_its_rank_and_its_inputs_allow(case):
    kind, p, v, m, stages = case
    step, took = simulate(kind, p, v, m, stages), durations(kind, p, v, stages)
    ends = {span.action: span.end_us for spans in step.spans for span in spans}
    assert tuple(tuple(span.action for span in spans) for spans in step.spans) == orders(kind, p, v, m)
    for spans in step.spans:
        free = 0.0
        for (what, stage, microbatch), start, end in spans:
            match what:
                case "F":
                    needs = [ends[Action("F", stage - 1, microbatch)]] if stage else []
                case "B":
                    needs = [ends[Action("F", stage, microbatch)]]
                    needs += [ends[Action("B", stage + 1, microbatch)]] if stage + 1 < p * v else []
                case _:
                    needs = [ends[Action("B", stage, microbatch)]]
            assert start == max([free, *needs])
            assert end == start + took[stage][what]
            free = end
    assert step.makespan_us == max(ends.values())


@settings(max_examples=150, deadline=None)
@given(cases())
def test_no_step_is_shorter_than_a_rank_or_the_way_of_a_microbatch(case):
    kind, p, v, m, stages = case
    step, took = simulate(kind, p, v, m, stages), durations(kind, p, v, stages)
    for rank in range(p):
        work = m * sum(sum(took[k].values()) for k in stages_of(kind, p, v, rank))
        assert step.makespan_us >= work
        assert step.idle_us[rank] == pytest.approx(step.makespan_us - work)
        assert step.bubble[rank] * step.makespan_us == pytest.approx(step.idle_us[rank])
    assert step.makespan_us >= sum(t["F"] + t["B"] for t in took)
    last = sum(t["F"] for t in took) + m * took[-1]["B"] + (m - 1) * took[-1]["F"]
    assert step.makespan_us >= last


@settings(max_examples=150, deadline=None)
@given(cases(), st.data())
def test_more_time_anywhere_never_makes_a_shorter_step(case, data):
    kind, p, v, m, stages = case
    k, part = data.draw(st.integers(0, len(stages) - 1)), data.draw(st.sampled_from(PARTS))
    slower = list(stages)
    slower[k] = dataclasses.replace(stages[k], **{part: getattr(stages[k], part) + data.draw(st.integers(1, 9))})
    before, after = simulate(kind, p, v, m, stages), simulate(kind, p, v, m, slower)
    assert after.makespan_us >= before.makespan_us
    for earlier, later in zip(itertools.chain(*before.spans), itertools.chain(*after.spans), strict=True):
        assert later.end_us >= earlier.end_us


@settings(max_examples=150, deadline=None)
@given(cases())
def test_memory_peaks_where_in_flight_says(case):
    kind, p, v, m, stages = case
    step = simulate(kind, p, v, m, stages)
    for rank, levels in enumerate(step.memory):
        sizes = [stages[k].activation_bytes for k in stages_of(kind, p, v, rank)]
        counts = in_flight(kind, p, v, m, rank)
        assert step.peak_bytes[rank] == max(sum(n * s for n, s in zip(c, sizes, strict=True)) for c in counts)
        assert levels[0] == Level(0.0, 0)
        assert levels[-1].num_bytes == 0
        assert list(levels) == sorted(levels, key=lambda level: level.time_us)
    unit = [dataclasses.replace(stage, activation_bytes=1) for stage in stages]
    peaks = simulate(kind, p, v, m, unit).peak_bytes
    assert peaks == tuple(max(map(sum, in_flight(kind, p, v, m, rank))) for rank in range(p))


def test_two_stages_by_hand():
    """Sends hold the sender: 1 each way, so the first rank is busy 4 + 1 a microbatch, the second 4 + 1 as well."""
    stages = [
        StageTimes(forward_us=1, input_us=2, weight_us=1, send_forward_us=1, send_backward_us=99, activation_bytes=5),
        StageTimes(forward_us=1, input_us=2, weight_us=1, send_forward_us=99, send_backward_us=1, activation_bytes=3),
    ]
    step = simulate("1f1b", 2, 1, 2, stages, end_us=(4, 1))
    rows = [[(str(span.action), span.start_us, span.end_us) for span in spans] for spans in step.spans]
    assert rows == [
        [("0F0", 0, 2), ("0F1", 2, 4), ("0B0", 7, 10), ("0B1", 12, 15)],
        [("1F0", 2, 3), ("1B0", 3, 7), ("1F1", 7, 8), ("1B1", 8, 12)],
    ]
    assert step.makespan_us == 19
    assert step.idle_us == (5, 8)
    assert step.bubble == pytest.approx((5 / 19, 8 / 19))
    assert step.memory[0] == ((0, 0), (0, 5), (2, 10), (10, 5), (15, 0))
    assert step.peak_bytes == (10, 3)


def test_split_backward_sends_before_the_weights_and_keeps_activations_until_after():
    stage = StageTimes(forward_us=1, input_us=1, weight_us=1, activation_bytes=1)
    step = simulate("zero-bubble", 2, 1, 2, [stage, stage])
    ends = {str(span.action): span for spans in step.spans for span in spans}
    assert ends["0B0"].start_us == ends["1B0"].end_us == 3
    assert ends["1W0"].start_us > ends["1B0"].end_us
    held = {level.time_us: level.num_bytes for level in step.memory[1]}
    assert held[ends["1W1"].end_us] == 0
    assert step.peak_bytes == (2, 2)


def test_the_turn_of_zbv_sends_nothing():
    """Stages 1 and 2 are both on the last rank."""
    stages = [StageTimes(forward_us=1, input_us=1, weight_us=1, send_forward_us=10, send_backward_us=10)] * 4
    step = simulate("zbv", 2, 2, 1, stages)
    took = {str(span.action): span.end_us - span.start_us for spans in step.spans for span in spans}
    assert [took[f"{k}F0"] for k in range(4)] == [11, 1, 11, 1]
    assert [took[f"{k}B0"] for k in range(4)] == [1, 11, 1, 11]


def test_the_end_of_step_counts_for_the_rank_that_has_it():
    stage = StageTimes(forward_us=1, input_us=1, weight_us=0)
    plain = simulate("1f1b", 3, 1, 3, [stage] * 3)
    last = plain.spans[2][-1].end_us
    assert simulate("1f1b", 3, 1, 3, [stage] * 3, end_us=(0, 0, 1)).makespan_us == plain.makespan_us
    assert simulate("1f1b", 3, 1, 3, [stage] * 3, end_us=(0, 0, 50)).makespan_us == last + 50


def actions(text):
    return tuple(Action(word[1], int(word[0]), int(word[2])) for word in text.split())


STAGE = StageTimes(forward_us=1, input_us=1, weight_us=1)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"), "rank 0 waits with 0B0 for 1B0; rank 1 waits with 1F1 for 0F1"),
        (("0F0 0B0", "1B0 1F0"), "rank 0 waits with 0B0 for 1B0; rank 1 waits with 1B0 for 1F0"),
        (("0F0 0B0 0W0", "1F0 1W0 1B0"), "rank 1 waits with 1W0 for 1B0"),
        (("0F0 0B0", "1F0 1F1 1B0 1B1"), "rank 1 waits with 1F1 for 0F1"),
    ],
)
def test_an_order_that_waits_for_itself_is_named(rows, words):
    with pytest.raises(InputError, match="the order of actions never ends: ") as caught:
        play([actions(row) for row in rows], [STAGE, STAGE])
    assert words in str(caught.value)


def test_play_takes_any_order_that_ends():
    """GPipe: all forward, then all backward."""
    rows = [actions("0F0 0F1 0B0 0B1"), actions("1F0 1F1 1B0 1B1")]
    step = play(rows, [STAGE, STAGE])
    assert step.spans[1][-1] == Span(Action("B", 1, 1), 5, 7)
    assert step.makespan_us == 9


def test_a_schedule_that_does_not_exist_is_refused():
    with pytest.raises(InputError, match="no 1f1b schedule"):
        simulate("1f1b", 4, 1, 3, [STAGE] * 4)


def test_a_hundred_thousand_actions_take_about_a_second():
    start = time.process_time()
    step = simulate("zero-bubble", 16, 4, 512, [STAGE] * 64)
    assert sum(map(len, step.spans)) == 3 * 64 * 512
    assert time.process_time() - start < 4  # one second on an idle core
