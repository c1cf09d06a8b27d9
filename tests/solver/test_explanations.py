"""Every alternative is a real plan: it makes the choice that was asked for, and a search with it confirms the price."""

from dataclasses import replace
from functools import cache

import pytest
from test_reprice import REQUEST, cluster, searched, traced
from toy_cost import ToyCost

from autoplan.errors import InputError
from autoplan.plan.patterns import by_pattern
from autoplan.plan.plan import Plan
from autoplan.plan.words import tensor_words
from autoplan.report.explain import explanation_text
from autoplan.sharding import Shard
from autoplan.solver.explain import explain
from autoplan.solver.forced import Force, best_forced
from autoplan.solver.reprice import Given, give, reprice
from autoplan.solver.solve import solve

EXACT = {"gap": 0.0}


@cache
def given(where=None, **pins: object) -> Given:
    where = where or cluster()
    plan = searched("llama", where, **pins)
    return give(plan, traced("llama"), where, ToyCost(), REQUEST)


def explained(found: Given, name: str, seconds: float = 60.0, **pins: object):
    request = replace(REQUEST, **pins)
    return explain(found, traced("llama"), request, name, seconds, lambda _: None)


def pins_of(plan: Plan) -> dict[str, object]:
    """Everything of level 0."""
    return {
        "pp": plan.mesh.size("pp"), "dp": plan.mesh.size("dp"), "cp": plan.mesh.size("cp"), "tp": plan.mesh.size("tp"),
        "microbatch": plan.batch_size // plan.parts, "data": plan.data, "schedule": plan.schedule,
    }  # fmt: skip


TENSOR = {"tp": 2, "dp": 2, "data": "replicate", "recompute": "none", **EXACT}


@pytest.mark.parametrize("pattern", ["layers.*.attention.wq.weight", "layers.*.attention_norm.weight", "output.weight"])
def test_a_search_that_must_place_the_weight_so_is_as_good_at_best_by_what_it_leaves_open(pattern):
    found = given(**TENSOR)
    (why,) = explained(found, pattern)
    names = [name for name in (p.name for p in found.plan.params) if _matches(pattern, name)]
    assert why.chosen == tensor_words(found.plan.param(names[0]).tensor)
    assert why.alternatives
    for other in why.alternatives:
        assert other.step_us is not None
        assert other.step_us >= found.step.total_us * (1 - 1e-9)
    places = {tensor_words(Shard(dim)): f"Shard({dim})" for dim in range(2)}
    for other in (each for each in why.alternatives if each.words in places):
        pin = f"{pattern}=tp:{places[other.words]}"
        pinned = searched("llama", cluster(), **{**TENSOR, **pins_of(found.plan), "pins": (pin,)})
        assert pinned.step.total <= other.step_us * (1 + 1e-9)
        assert other.step_us <= pinned.step.total * 1.05


def _matches(pattern: str, name: str) -> bool:
    return name in by_pattern((name,)).get(pattern, ()) or name == pattern


def test_what_is_forced_is_there_and_the_rest_of_the_plan_stays():
    found = given(**TENSOR)
    name = "param:layers.0.attention.wq.weight"
    index = next(i for i, s in enumerate(found.tables.sg.segments) if name in s.params)
    option = found.options[index]
    chosen = option.resolved.sources[name]
    other = next(p for v in option.resolved.problem.values if v.name == name for p in v.sources if p != chosen)
    forced = best_forced(found, {index: Force(params=((name, other),))})
    assert forced.after.resolved.sources[name] == other
    assert forced.before is option
    for i, options in enumerate(o for stage in forced.step.stages for o in stage.options):
        assert (options is found.options[i]) == (i != index)
    number = next(n for n, (node, _) in enumerate(option.resolved.nodes) if len(node.candidates) > 1)
    for candidate in range(len(option.resolved.nodes[number][0].candidates)):
        made = best_forced(found, {index: Force(node=(number, candidate))}).after.resolved.nodes[number][1]
        assert made == option.resolved.nodes[number][0].candidates[candidate]


def test_an_op_by_node_and_by_module():
    found = given(**TENSOR)
    several = explained(found, "layers.*.attention")
    assert 1 < len(several) <= 6
    (one,) = explained(found, several[0].subject.removeprefix("op "))
    assert one.subject == several[0].subject
    assert one.chosen == several[0].chosen
    text = explanation_text(one)
    assert max(map(len, text.splitlines())) <= 120
    assert "Alternatives, all else as in the plan" in text


def test_with_too_little_memory_the_faster_way_says_how_much_more_it_needs():
    """A plan is edited to the lean placement of a weight, on devices that have room for just that."""
    slow = ToyCost(link_bytes_per_us=1.0)
    plan = solve(traced("llama"), cluster(2), slow, replace(REQUEST, tp=2, dp=1, recompute="none", gap=0.0), "toy")
    roomy = give(plan, traced("llama"), cluster(2), slow, REQUEST)
    pattern, words = next(
        (pattern, other.words)
        for pattern in ("layers.*.feed_forward.w2.weight", "output.weight", "tok_embeddings.weight")
        for other in explained(roomy, pattern)[0].alternatives
        if other.peak_bytes < roomy.step.peak_bytes and other.step_us > roomy.step.total_us
    )
    place = next(p for v in _values(roomy, pattern) for p in v.sources if tensor_words(p) == words)
    lean = [replace(p, tensor=place) if _matches(pattern, p.name) else p for p in roomy.plan.params]
    plan, where = replace(roomy.plan, params=tuple(lean)), cluster(2, memory_bytes=roomy.step.peak_bytes - 1)
    tight = give(plan, traced("llama"), where, slow, REQUEST)
    assert tight.step.peak_bytes <= where.memory_bytes
    (why,) = explained(tight, pattern)
    for other in why.alternatives:
        assert ("does not fit: short by" in other.reason) == (other.peak_bytes > where.memory_bytes)
    assert any("more memory a device" in text and "would fit and be" in text for text in why.changes)


def _values(found: Given, pattern: str):
    for option in found.options:
        yield from (v for v in option.resolved.problem.values if _matches(pattern, v.name.removeprefix("param:")))


@pytest.mark.parametrize(
    "pins", [{"pp": 2, "dp": 2, "tp": 1}, {"pp": 2, "schedule": "interleaved", "chunks": 2}], ids=str
)
def test_a_moved_cut_costs_what_the_plan_with_that_cut_costs(pins):
    found = given(**pins)
    plan = found.plan
    for number in range(len(plan.stages)):
        (why,) = explained(found, f"stage {number}")
        for other in why.alternatives:
            edge = number if other.words.startswith("begins") else number + 1
            shift = -1 if "earlier" in other.words else 1
            moved = reprice(_with_cut(plan, edge, shift), traced("llama"), cluster(), ToyCost(), REQUEST, "toy")
            assert other.step_us == moved.step.total
            assert other.peak_bytes == max(stage.memory.total for stage in moved.stages)
    with pytest.raises(InputError, match="there is no stage 9: the plan has stages 0 to"):
        explained(found, "stage 9")


def _with_cut(plan: Plan, edge: int, shift: int) -> Plan:
    names = [name for stage in plan.stages for name in stage.layouts]
    edges = [*(stage.start for stage in plan.stages), plan.stages[-1].end]
    edges[edge] += shift
    stages = (
        replace(stage, start=start, end=end, layouts=tuple(names[start:end]))
        for stage, start, end in zip(plan.stages, edges, edges[1:], strict=False)
    )
    return replace(plan, stages=tuple(stages))


@pytest.mark.parametrize("name", ["tp", "pp", "schedule", "recompute", "microbatch"])
def test_another_value_of_a_choice_costs_what_a_search_with_it_pinned_finds(name):
    found = given(dp=1, cp=1, data="replicate")
    (why,) = explained(found, name, dp=1, cp=1, data="replicate")
    assert why.terms == "all else searched anew"
    known = {}
    for other in why.alternatives:
        value = other.words.partition(":")[0].removeprefix(f"{name}=")
        known[value] = other
        if other.step_us is None:
            assert other.reason
            continue
        pins = {"dp": 1, "cp": 1, "data": "replicate", name: int(value) if value.isdigit() else value}
        plan = solve(traced("llama"), cluster(), ToyCost(), replace(REQUEST, **pins), "toy")
        assert other.step_us == pytest.approx(plan.step.total, rel=0.011)
    assert why.chosen not in known
    if name == "tp":
        assert "4 query heads and 2 key-value heads" in known["4"].reason


def test_a_search_that_finds_nothing_in_time_falls_back_on_what_is_known(monkeypatch):
    from autoplan.solver import explain_choice

    def endless(tables, space, request, progress):
        progress("nothing yet")
        while True:
            progress("nothing yet")

    monkeypatch.setattr(explain_choice, "search", endless)
    found = given()
    (why,) = explained(found, "pp", 0.05)
    assert all(other.step_us is None for other in why.alternatives)
    reasons = [other.reason for other in why.alternatives if "nothing was found in time" in other.reason]
    assert any("the search that made the plan says of pp=" in reason for reason in reasons)


def test_unknown_names_have_near_matches():
    with pytest.raises(InputError, match="did you mean layers.0.attention.wq.weight"):
        explained(given(**TENSOR), "layers.0.attention.wk_weight".replace("wk_", "wq_"))
    with pytest.raises(InputError, match="A name is a weight or a pattern of weights"):
        explained(given(**TENSOR), "zzz")


def test_an_axis_of_one_has_nothing_to_choose():
    (why,) = explained(given(tp=1, dp=4, data="replicate"), "output.weight")
    assert "tp is 1" in why.chosen
    assert not why.alternatives
