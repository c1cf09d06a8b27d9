"""Rows, timeline and page of a report."""

import dataclasses
import itertools
import json
import re
from html.parser import HTMLParser

import pytest
from plan.sample import memory, one_device_plan, sample_plan
from plan.wide_sample import wide_plan

from autoplan.cluster import Cluster, Mesh
from autoplan.plan.plan import Amounts, Plan, Stage
from autoplan.report.html import report_html
from autoplan.report.render import report_json, report_text, timeline_text
from autoplan.report.report import make_report
from autoplan.report.timeline import shown_windows, simulate


def pipeline(times: list[tuple[float, float]], num_microbatches: int) -> Plan:
    """A plan of as many stages as times; only what a timeline reads makes sense."""
    plan, count = sample_plan(), len(times)
    stages = tuple(
        Stage(
            rank=i,
            start=i,
            end=i + 1,
            layouts=("embed",),
            forward_us=forward,
            backward_us=backward,
            memory=memory(1000, 500),
            collectives=(),
        )
        for i, (forward, backward) in enumerate(times)
    )
    return dataclasses.replace(
        plan,
        cluster=Cluster(num_nodes=1, devices_per_node=count, device="cpu", memory_bytes=2**34),
        mesh=Mesh(axes=("pp", "dp", "cp", "tp"), sizes=(count, 1, 1, 1)),
        data="replicate",
        shards=1,
        num_microbatches=num_microbatches,
        batch_size=num_microbatches,
        segment_kinds=(0,) * count,
        segment_params=plan.segment_params[:1] * count,
        stages=stages,
        step=Amounts(by_cause=(("compute", 1.0),)),
    )


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
@pytest.mark.parametrize("num_microbatches", [5, 6, 9])
def test_even_stages_take_the_textbook_time(num_stages, num_microbatches):
    timeline = simulate(pipeline([(1.0, 2.0)] * num_stages, num_microbatches))
    assert timeline.end_us == pytest.approx((num_microbatches + num_stages - 1) * 3.0)
    for stage in range(num_stages):
        assert timeline.idle_us(stage) == pytest.approx((num_stages - 1) * 3.0)


@pytest.mark.parametrize("times", [[(1, 2), (4, 5), (2, 2)], [(5, 1), (1, 5), (0, 3)]])
def test_passes_keep_the_order_and_wait_for_their_input(times):
    timeline = simulate(pipeline(times, 6))
    ends = {(p.stage, p.direction, p.microbatch): p.end_us for passes in timeline.passes for p in passes}
    for stage, passes in enumerate(timeline.passes):
        assert len(passes) == 12
        for before, after in zip(passes, passes[1:], strict=False):
            assert after.start_us >= before.end_us
        for p in passes:
            if p.direction == "forward" and stage:
                assert p.start_us >= ends[stage - 1, "forward", p.microbatch]
            if p.direction == "backward":
                source = (stage + 1, "backward") if stage < 2 else (stage, "forward")
                assert p.start_us >= ends[(*source, p.microbatch)]


def test_a_long_step_is_shown_by_its_two_ends():
    short, long = simulate(pipeline([(1, 2)] * 2, 4)), simulate(pipeline([(1, 2)] * 2, 500))
    assert len(shown_windows(short)) == 1
    first, last = shown_windows(long)
    assert (first.start_us, last.end_us) == (0.0, long.step_us)
    assert first.end_us < last.start_us


def test_text_timeline():
    rows = timeline_text(simulate(pipeline([(1, 2)] * 2, 2))).splitlines()[2:]
    assert [len(row) for row in rows] == [108, 108]
    runs = ["".join(letter for letter, _ in itertools.groupby(row[12:])) for row in rows]
    assert runs == ["01.a.b", ".0a1b."]


def test_numbers_add_up():
    report = make_report(sample_plan())
    assert sum(s.amount for s in report.step) == pytest.approx(report.step_us)
    assert sum(s.share for s in report.step) == pytest.approx(1)
    for row in report.places:
        assert sum(s.amount for s in row.memory) == row.memory_bytes == row.limit_bytes - row.free_bytes
    assert sum(w.count for w in report.weights) == len(sample_plan().params)
    assert report.runners_up[0].slower_us == pytest.approx(20480 - 19179)
    assert report.runners_up[1].slower_us is None


def test_json_report_reads_back():
    data = json.loads(report_json(make_report(sample_plan())))
    assert data["step_us"] == 19179.0
    assert [place["ranks"] for place in data["places"]] == [[[0, 3]], [[4, 7]]]
    assert data["tokens_per_s"] == pytest.approx(64 * 1024 / 0.019179)
    assert data["proof"]["gap"] == pytest.approx(1 - 19100 / 19179)
    assert data["cannot_run"] == []
    assert data["stages"][0]["collectives"][0]["kind"] == "all_gather"


def test_good_plans_have_their_shares_and_rates():
    facts = make_report(wide_plan()).choices
    assert [f.rank for f in facts] == [1, 2, 3]
    assert [f.on_front for f in facts] == [True, False, True]
    slow = facts[2]
    assert slow.step_us == 55_900
    assert slow.bubble_share == pytest.approx(9_000 / 55_900)
    assert slow.communication_share == pytest.approx(5_000 / 55_900)
    assert slow.tokens_per_s == pytest.approx(64 * 1024 / 0.0559)
    assert slow.mfu == pytest.approx(2**49 / (989e12 * 32 * 0.0559))
    assert facts[0].mfu == pytest.approx(wide_plan().mfu)


def test_chunks_stand_by_place():
    report = make_report(wide_plan())
    assert [(row.place, row.chunk, row.stage) for row in report.stages] == [(0, 0, 0), (0, 1, 2), (1, 0, 1), (1, 1, 3)]
    assert [place.stages for place in report.places] == [(0, 2), (1, 3)]
    assert report.places[1].ranks == ((4, 7), (12, 15), (20, 23), (28, 31))
    assert report.cannot_run[:2] == ("schedule interleaved", "cp=2")


def test_the_page_tells_proof_choices_and_what_cannot_run():
    words = " ".join(parse(report_html(wide_plan())).words)
    for expected in (
        "best so far, within 1.38%", "bounded away", "the parameters alone do not fit", "Good plans",
        "This version cannot run it yet: schedule interleaved", "over ep 4", "over 4 of 8 data ranks", "MFU 34.9%",
        "optimizer states live in host memory", "place 1",
    ):  # fmt: skip
        assert expected in words, expected
    assert "Good plans" not in report_html(sample_plan())
    assert "cannot run" not in report_html(sample_plan())


def test_text_report_has_a_timeline_only_for_a_pipeline():
    assert "Timeline of a step" in report_text(sample_plan())
    assert report_text(one_device_plan()) == str(one_device_plan())


class Page(HTMLParser):
    """Collects tags, and checks that they nest."""

    VOID = frozenset({"meta", "link", "br", "img"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def parse(html: str) -> Page:
    page = Page()
    page.feed(html)
    assert not page.open
    return page


PLANS = {
    "sample": sample_plan(),
    "one device": one_device_plan(),
    "long": pipeline([(1, 2)] * 9, 300),
    "wide": wide_plan(),
}


@pytest.mark.parametrize("name", PLANS)
def test_the_page_is_offline_and_has_the_pictures(name):
    html = report_html(PLANS[name])
    page = parse(html)
    assert not re.search(r"https?:|//|url\(|@import|<script|<link|src=|href=", html)
    pictures = {attrs["id"]: attrs for tag, attrs in page.tags if tag == "svg"}
    assert set(pictures) == {"timeline", "step", "memory"}
    ids = {attrs["id"] for _, attrs in page.tags if "id" in attrs}
    for attrs in pictures.values():
        assert attrs["role"] == "img"
        assert set(attrs["aria-labelledby"].split()) <= ids
    assert sum(attrs.get("class") == "limit" for _, attrs in page.tags) == 1
    assert any(attrs.get("class") == "backward" for _, attrs in page.tags)


def test_the_pictures_show_every_pass_and_every_cause():
    tags = parse(report_html(sample_plan())).tags
    count = {css: sum(attrs.get("class") == css for _, attrs in tags) for css in ("forward", "backward")}
    assert count == {"forward": 8, "backward": 8}
    rects = [attrs for tag, attrs in tags if tag == "rect"]
    assert sum(attrs["class"] == "c6" for attrs in rects) == 2  # communication buffers of two stages


def test_names_are_escaped():
    html = report_html(dataclasses.replace(sample_plan(), model="<b>&model.py"))
    assert "<b>&model" not in html
    assert "&lt;b&gt;&amp;model.py" in html


def test_a_plan_over_its_limit_says_so():
    plan = dataclasses.replace(
        sample_plan(), cluster=dataclasses.replace(sample_plan().cluster, memory_bytes=3 * 2**30)
    )
    assert "over by" in report_html(plan)
    assert "over by" in str(plan)
