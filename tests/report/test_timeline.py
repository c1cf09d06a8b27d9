"""Timelines of schedules with chunks and split backward passes; 1F1B is in test_report.py."""

import dataclasses
import re

import pytest
from plan.sample import sample_plan
from plan.wide_sample import wide_plan

from autoplan.errors import InputError
from autoplan.plan.schedule import orders
from autoplan.report.html import report_html
from autoplan.report.render import timeline_text
from autoplan.report.svg import timeline_svg
from autoplan.report.timeline import shown_windows, simulate


def plan_by(schedule, num_microbatches=4):
    """The plan of 4 stages on 2 places by another schedule, its stages on the ranks of that."""
    plan, ranks = wide_plan(), (0, 1, 1, 0) if schedule == "zbv" else (0, 1, 0, 1)
    stages = tuple(dataclasses.replace(s, rank=r) for s, r in zip(plan.stages, ranks, strict=True))
    return dataclasses.replace(plan, schedule=schedule, stages=stages, num_microbatches=num_microbatches)


@pytest.mark.parametrize("schedule", ["interleaved", "zero-bubble", "zbv"])
def test_each_place_runs_the_order_of_the_schedule_with_the_stages_times(schedule):
    plan = plan_by(schedule)
    timeline = simulate(plan)
    assert timeline.row_names == ("place 0", "place 1")
    letters = {"forward": "F", "backward": "B", "weight": "W"}
    for passes, order in zip(timeline.passes, orders(schedule, 2, 2, 4), strict=True):
        assert tuple((letters[p.direction], p.stage, p.microbatch) for p in passes) == order
    split = schedule != "interleaved"
    assert timeline.splits_backward == split
    for p in (p for passes in timeline.passes for p in passes):
        stage = plan.stages[p.stage]
        backward = stage.backward_us - stage.weight_us if split else stage.backward_us
        took = {"forward": stage.forward_us, "backward": backward, "weight": stage.weight_us}[p.direction]
        assert p.end_us - p.start_us == pytest.approx(took)
        assert p.chunk == sorted({q.stage for q in timeline.passes[stage.rank]}).index(p.stage)


def test_waiting_and_working_fill_the_pipeline():
    timeline = simulate(plan_by("zbv"))
    for place, stages in enumerate(((0, 3), (1, 2))):
        work = 4 * sum(3000 + 2 * k for k in stages)
        assert timeline.idle_us(place) == pytest.approx(timeline.end_us - work)
        assert timeline.idle_us(place) > 0


def test_the_picture_shades_chunks_and_names_gradients_of_weights():
    page, plain = report_html(plan_by("zero-bubble")), report_html(sample_plan())
    for css in ("forward", "backward", "weight"):
        rects = re.findall(rf'<rect class="{css}"[^>]*>', page)
        assert len(rects) == 16
        assert sum("fill-opacity" in rect for rect in rects) == 8
    assert "stage 2, microbatch 0, gradient of weights, " in page
    assert "place 1 runs 24 passes and waits " in page
    for words in ("gradient of weights</li>", "from dark to light", "fill-opacity"):
        assert words in page
        assert words not in plain


def test_text_shows_gradients_of_weights_as_capitals():
    head, *lines = timeline_text(simulate(plan_by("zero-bubble"))).splitlines()[1:]
    assert "capitals" in lines[0]
    assert [line[:9] for line in lines[1:]] == ["  place 0", "  place 1"]
    assert all(re.search("[0-9]", line) and re.search("[a-j]", line) and re.search("[A-J]", line) for line in lines[1:])
    assert "capitals" not in timeline_text(simulate(plan_by("interleaved")))


@pytest.mark.parametrize("schedule", ["interleaved", "zero-bubble", "zbv"])
def test_a_long_step_shows_its_filling_and_its_draining(schedule):
    timeline = simulate(plan_by(schedule, 200))
    first, last = shown_windows(timeline)
    assert first.start_us == 0.0
    assert last.end_us == timeline.step_us
    assert first.end_us < last.start_us
    for passes in timeline.passes:
        assert first.end_us > next(p.start_us for p in passes if p.direction == "backward")
        assert last.start_us < max(p.end_us for p in passes if p.direction == "forward")
    shown = 24 * 2 * (3 if timeline.splits_backward else 2)
    assert shown <= timeline_svg(timeline).count("<rect") <= shown + 10  # a few at the edges, and the idle background
    assert len(shown_windows(simulate(plan_by(schedule)))) == 1


def test_a_schedule_that_does_not_exist_is_refused():
    with pytest.raises(InputError, match="9 microbatches"):
        simulate(plan_by("interleaved", 9))
