"""What a user pins, forbids and keeps: every mistake by its text, every effect by an answer that differs without it."""

from dataclasses import replace
from functools import cache

import llama
import nanogpt
import pytest
from random_plan import random_plan
from toy_cost import ToyCost

from autoplan.cluster import Group
from autoplan.errors import InputError, PlanError
from autoplan.plan.place import place
from autoplan.plan.plan import RECOMPUTE
from autoplan.sharding import PARTIAL, REPLICATE, REPLICATE_PARTIAL_GRAD, Shard
from autoplan.solver.batch import split_batch
from autoplan.solver.block import solve_block
from autoplan.solver.build import build_problem, make_model
from autoplan.solver.constraints import Constraints, Flag, allows, constrain, is_whole, refine_classes
from autoplan.solver.constraints_text import parse_constraints, stands_for
from autoplan.solver.legal import check_strategies
from autoplan.solver.problem import Axis, Prices, sources_of, wants_of
from autoplan.solver.request import Request
from autoplan.trace.capture import trace_model
from autoplan.trace.segments import segment_graph

REQUEST = Request(model="llama", dtype="float32")
W1 = "layers.*.feed_forward.w1.weight"
PRICES = Prices(step=1.0)


@cache
def sg():
    config = llama.Config(num_layers=3, width=64, hidden=96)
    return segment_graph(trace_model(llama.Llama(config), llama.example_inputs(4)).graph)


@cache
def tied():
    """Its head is its embedding: ``lm_head.weight`` is another name of ``wte.weight``."""
    return segment_graph(trace_model(nanogpt.GPT(nanogpt.Config(num_layers=2)), nanogpt.example_inputs(4)).graph)


def parse(model=None, **wishes):
    return parse_constraints(replace(REQUEST, **wishes), model or sg())


def solved(constraints, kind="block", degree=2, prices=PRICES):
    """Placements of the parameters, and strategies of the ops by module, in the best answer for a class."""
    graph = refine_classes(sg(), constraints)
    made = make_model(graph, split_batch(graph), 1)
    segment = graph.representative(graph.kind_names.index(kind))
    problem = build_problem(made, segment, Axis(group=Group(size=degree, per_node=degree), cost=ToyCost()), True)
    left = constrain(problem, segment, made.nodes, constraints)
    choice = solve_block(left, prices).choice
    params = {name.removeprefix("param:"): place for name, place in choice.params}
    strategies = {n.name: n.candidates[k].strategy for n, k in zip(left.nodes, choice.candidates, strict=True)}
    return params, [(made.nodes[name].module_path, strategy) for name, strategy in strategies.items()]


# effects


def test_nothing_asked_changes_nothing():
    nothing = parse()
    assert nothing == Constraints()
    assert refine_classes(sg(), nothing) is sg()
    made = make_model(sg(), split_batch(sg()), 1)
    segment = sg().representative(1)
    problem = build_problem(made, segment, Axis(group=Group(size=2, per_node=2), cost=ToyCost()), True)
    assert constrain(problem, segment, made.nodes, nothing) is problem


def test_a_pin_is_kept_and_was_not_the_answer_before():
    name = "layers.0.feed_forward.w1.weight"
    assert solved(parse())[0][name] != Shard(1)
    assert solved(parse(pins=(f"{W1}=tp:Shard(1)",)))[0][name] == Shard(1)


def test_a_forbid_is_kept_and_was_the_answer_before():
    name = "layers.0.feed_forward.w1.weight"
    before = solved(parse())[0][name]
    after = solved(parse(forbid=(f"{W1}=tp:{before}",)))[0][name]
    assert after != before


def test_forbids_add_up():
    name = "layers.0.feed_forward.w1.weight"
    texts = [f"{W1}=tp:{place}" for place in ("Shard(0)", "Shard(1)", "Shard(0, blocks=2)")]
    assert solved(parse(forbid=tuple(texts)))[0][name] in (REPLICATE, REPLICATE_PARTIAL_GRAD)


def test_a_placement_is_only_the_one_written():
    name = "layers.0.feed_forward.w1.weight"
    assert solved(parse(pins=(f"{W1}=tp:Shard(0, blocks=2)",)))[0][name] == Shard(0, blocks=2)
    constraints = parse(pins=(f"{W1}=tp:Shard(0)",))
    assert not constraints.permits(f"param:{name}", Shard(0, blocks=2))
    assert not parse(forbid=(f"{W1}=tp:Replicate",)).permits(f"param:{name}", REPLICATE)
    assert parse(forbid=(f"{W1}=tp:Replicate",)).permits(f"param:{name}", REPLICATE_PARTIAL_GRAD)


def test_a_kept_module_runs_whole():
    def ops(found, module):
        return [strategy for path, strategy in found[1] if path.startswith(f"layers.0.{module}")]

    before, kept = solved(parse()), solved(parse(keep=("layers.*.feed_forward",)))
    assert len(ops(before, "feed_forward")) >= 5
    assert not any(map(is_whole, ops(before, "feed_forward")))
    assert all(map(is_whole, ops(kept, "feed_forward")))
    assert not all(map(is_whole, ops(kept, "attention")))
    assert not any(isinstance(place, Shard) for name, place in kept[0].items() if "feed_forward" in name)


def test_a_parameter_of_a_kept_module_is_not_split_even_where_memory_is_dear():
    dear = Prices(state_us_per_byte=10.0)
    name = "layers.0.feed_forward.w1.weight"
    assert isinstance(solved(parse(), prices=dear)[0][name], Shard)
    assert not isinstance(solved(parse(keep=("layers.*.feed_forward",)), prices=dear)[0][name], Shard)


def test_a_kept_module_is_the_head_alone():
    assert isinstance(solved(parse(), "head")[0]["output.weight"], Shard)
    assert not isinstance(solved(parse(keep=("output",)), "head")[0]["output.weight"], Shard)
    assert solved(parse(keep=("output",)))[0] == solved(parse())[0]


def test_an_axis_of_one_is_left_as_it_is():
    params, _ = solved(parse(pins=(f"{W1}=tp:Shard(1)",), keep=("layers.*.attention",)), degree=1)
    assert set(params.values()) == {REPLICATE}


def test_only_moves_that_can_occur_are_left():
    constraints = parse(pins=(f"{W1}=tp:Shard(1)",), keep=("layers.*.attention",))
    made, segment = make_model(sg(), split_batch(sg()), 1), sg().representative(1)
    problem = build_problem(made, segment, Axis(group=Group(size=2, per_node=2), cost=ToyCost()), True)
    left = constrain(problem, segment, made.nodes, constraints)
    sources, wants = sources_of(left.nodes, left.values), set(wants_of(left.nodes)) | set(left.outputs)
    expected = {(name, src, dst) for name, dst in wants for src in sources[name] if dst not in (None, src)}
    assert set(left.moves) == expected
    assert len(left.moves) < len(problem.moves)
    for value in left.values:
        assert value.origin != "param" or len(value.sources) == len(value.sync_us)


# classes


def test_a_class_is_divided_where_only_some_of_it_are_pinned():
    constraints = parse(pins=("layers.1.feed_forward.w1.weight=tp:Shard(1)",))
    found = refine_classes(sg(), constraints)
    assert found.kind_names == ("embed", "block", "block.2", "head")
    assert [s.kind for s in found.segments] == [0, 1, 2, 1, 3]
    assert [replace(s, kind=0) for s in found.segments] == [replace(s, kind=0) for s in sg().segments]
    assert solved(constraints, "block.2")[0]["layers.1.feed_forward.w1.weight"] == Shard(1)
    assert solved(constraints, "block")[0] == solved(parse())[0]


def test_a_class_is_divided_by_kept_modules_and_forbids_but_not_by_flags():
    assert refine_classes(sg(), parse(keep=("layers.2",))).kind_names == ("embed", "block", "block.2", "head")
    forbid = ("layers.0.**=tp:Shard(1)", "layers.[01].feed_forward.w2.weight=tp:Shard(0)")
    assert refine_classes(sg(), parse(forbid=forbid)).kind_names == ("embed", "block", "block.2", "block.3", "head")
    every = tuple(f"layers.{i}.feed_forward.w1.weight=tp:Shard(1)" for i in range(3))
    assert refine_classes(sg(), parse(pins=every)) is sg()


def test_a_class_is_divided_by_kept_ops_that_read_no_parameter():
    op = sg().segments[2].nodes[1]
    kept = Constraints(kept={op: Flag(name="keep", text="layers.1.act")})
    assert [s.kind for s in refine_classes(sg(), kept).segments] == [0, 1, 2, 1, 3]


def test_names_of_divided_classes_are_unique():
    model = replace(sg(), kind_names=("embed", "block", "block.2"))
    found = refine_classes(model, parse(pins=("layers.2.feed_forward.w1.weight=tp:Shard(1)",)))
    assert found.kind_names == ("embed", "block", "block.3", "block.2")


# level 0


def test_what_is_forbidden_at_level_0():
    constraints = parse(forbid=("pp=2", "schedule=zbv", "recompute=full", "offload=true", "dp=16"), offload=True)
    assert allows(constraints, pp=2, dp=1) == "forbid 'pp=2'"
    assert allows(constraints, schedule="zbv") == "forbid 'schedule=zbv'"
    assert allows(constraints, recompute="full") == "forbid 'recompute=full'"
    assert allows(constraints, offload=True) == "forbid 'offload=true'"
    assert allows(constraints, dp=16) == "forbid 'dp=16'"
    assert allows(constraints, pp=1, dp=2, schedule="1f1b", recompute="none", offload=False) == ""


def test_a_pinned_split_needs_a_tensor_axis():
    assert allows(parse(pins=(f"{W1}=tp:Shard(1)",)), tp=1) == f"pin '{W1}=tp:Shard(1)'"
    assert allows(parse(pins=(f"{W1}=tp:Shard(1)",)), tp=2) == ""
    assert allows(parse(pins=(f"{W1}=tp:Replicate",)), tp=1) == ""


# patterns


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("layers.*.w1.weight", "layers.0.w1.weight", True),
        ("layers.*.w1.weight", "layers.0.mlp.w1.weight", False),
        ("layers.*.*.w?.weight", "layers.0.mlp.w1.weight", True),
        ("layers.**", "layers.0.mlp.w1.weight", True),
        ("**.weight", "layers.0.mlp.w1.weight", True),
        ("**.weight", "weight", True),
        ("**.w1.*", "layers.0.mlp.w2.weight", False),
        ("layers.1*.w", "layers.12.w", True),
        ("layers.1", "layers.12", False),
    ],
)
def test_patterns(pattern, name, matches):
    assert stands_for(pattern, name) is matches


def test_a_tied_parameter_is_found_by_all_its_names():
    (value,) = (v for v in parse(tied(), pins=("wte.weight=tp:Shard(0)",)).required)
    assert list(parse(tied(), pins=("lm_head.weight=tp:Shard(0)",)).required) == [value]
    assert list(parse(tied(), keep=("lm_head",)).whole) == [value]


# mistakes


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"pins": (W1,)}, f"pin '{W1}' is not understood; expected PATTERN=tp:PLACEMENT, such as layers"),
        ({"pins": ("pp=2",)}, "A pinned pp is a flag of its own, --pp"),
        ({"pins": (f"{W1}=dp:Shard(0)",)}, "names the axis 'dp'; parameters are placed on tp"),
        ({"pins": (f"{W1}=tp:shard(0)",)}, "'shard(0)' is not a placement; expected .* did you mean Shard(0)"),
        ({"pins": (f"{W1}=tp:Partial",)}, "a parameter is never Partial"),
        ({"pins": ("layers.*.ffn.w1.weight=tp:Shard(0)",)},
         "matches no parameter that an op of the model reads; did you mean .* layers.*.feed_forward.w1.weight"),
        ({"pins": ("zzz=tp:Shard(0)",)}, "reads; there are tok_embeddings.weight, .* and 6 more"),
        ({"pins": ("layers.3.*=tp:Shard(0)",)}, "there are|did you mean"),
        ({"pins": ("layers.2.*=tp:Shard(0)",)},
         "** for any number of parts; layers.2.** would match, for example, layers.2."),
        ({"pins": ("layers.*.feed_forward.w1=tp:Shard(0)",)}, "layers.*.feed_forward.w1.** would match"),
        ({"pins": (f"{W1}=tp:Shard(0)", "layers.1.*.w1.weight=tp:Shard(1)")},
         f"pin '{W1}=tp:Shard(0)' and pin 'layers.1.*.w1.weight=tp:Shard(1)' contradict each other: both place "
         "layers.1.feed_forward.w1.weight"),
        ({"pins": (f"{W1}=tp:Shard(0)",), "forbid": ("layers.1.**=tp:Shard(0)",)},
         f"pin '{W1}=tp:Shard(0)' and forbid 'layers.1.**=tp:Shard(0)' contradict each other: both speak of Shard(0)"),
        ({"pins": (f"{W1}=tp:Shard(0)",), "keep": ("layers.2.feed_forward",)},
         f"pin '{W1}=tp:Shard(0)' and keep 'layers.2.feed_forward' contradict each other: one splits layers.2."),
        ({"pins": ("norm.weight=tp:Shard(1)",)}, "cannot be: norm.weight float32[64] has no dim 1; its dims are 0"),
        ({"pins": (f"{W1}=tp:Shard(0, blocks=7)",)}, "has 96 along dim 0, which no degree splits in 7 equal blocks"),
        ({"pins": (f"{W1}=tp:Shard(0)",), "tp": 1}, "splits layers.0.feed_forward.w1.weight over tp, but tp=1 is"),
        ({"forbid": ("norm.weight=tp:Shard(1)",)}, "forbids nothing: norm.weight float32[64] has no dim 1"),
        ({"forbid": ("pp",)}, "or NAME=VALUE with NAME one of pp, dp, "),
        ({"forbid": ("shedule=zbv",)}, "did you mean schedule?"),
        ({"forbid": ("schedule=zvb",)}, "schedule has no value 'zvb'; it is one of 1f1b, .* did you mean zbv"),
        ({"forbid": ("tp=two",)}, "tp is a whole number from 1, found 'two'"),
        ({"forbid": ("tp=0",)}, "tp is a whole number from 1, found '0'"),
        ({"forbid": ("tp=2",), "tp": 2}, "forbid 'tp=2' excludes the pinned tp=2: leave one of the two out"),
        ({"forbid": ("data=shard",), "data": "shard"}, "forbid 'data=shard' excludes the pinned data=shard"),
        ({"forbid": tuple(f"recompute={way}" for way in RECOMPUTE)}, "leave no value of recompute"),
        ({"forbid": ("offload=false",)}, "leaves nothing: offload is not allowed"),
        ({"keep": ("layers.*.mlp",)}, "keep 'layers.*.mlp' matches no module that has an op or a parameter; "),
        ({"keep": ("layers.*.feedforward",)}, "did you mean layers.*.feed_forward"),
        ({"keep": ("output.weight",)}, "matches no module"),
    ],
)  # fmt: skip
def test_mistakes(wishes, message):
    with pytest.raises(InputError) as caught:
        parse(**wishes)
    found = str(caught.value)
    for part in message.split(" .* "):
        assert any(way in found for way in part.split("|")), found


def test_names_of_one_tensor_cannot_be_pinned_apart():
    with pytest.raises(InputError, match="wte.weight and lm_head.weight are names of one tensor"):
        parse(tied(), pins=("wte.weight=tp:Shard(0)", "lm_head.weight=tp:Replicate"))
    with pytest.raises(InputError, match="one splits wte.weight, the other leaves it whole"):
        parse(tied(), pins=("wte.weight=tp:Shard(0)",), keep=("lm_head",))


def test_a_placement_that_no_reader_can_use_is_refused_with_those_that_are_possible():
    with pytest.raises(InputError) as caught:
        solved(parse(pins=(f"{W1}=tp:Shard(0, blocks=3)",)))
    found = str(caught.value)
    assert f"pin '{W1}=tp:Shard(0, blocks=3)' cannot be at tp=2: layers.0.feed_forward.w1.weight" in found
    assert "is read by aten.linear.default in module layers.0.feed_forward.w1 (llama.py:" in found
    assert "can be Shard(0), Shard(0, blocks=2), Shard(1), Replicate, Replicate(partial_grad) there" in found


def test_everything_forbidden_names_all_flags():
    places = ("Shard(0)", "Replicate", "Replicate(partial_grad)", "Shard(0, blocks=2)")
    with pytest.raises(
        InputError, match="forbid 'norm.weight=tp:Shard.0.' with forbid 'norm.weight=tp:Replicate' with"
    ):
        solved(parse(forbid=tuple(f"norm.weight=tp:{place}" for place in places)), "head")


def test_an_op_that_cannot_run_whole_is_named():
    constraints = parse(keep=("layers.*.feed_forward",))
    made, segment = make_model(sg(), split_batch(sg()), 1), sg().representative(1)
    problem = build_problem(made, segment, Axis(group=Group(size=2, per_node=2), cost=ToyCost()), True)
    split = [
        replace(n, candidates=tuple(c for c in n.candidates if not is_whole(c.strategy)) or n.candidates)
        for n in problem.nodes
    ]
    with pytest.raises(InputError, match=r"keep .* cannot be at tp=2: aten.linear.default in module layers.0.feed"):
        constrain(replace(problem, nodes=tuple(split)), segment, made.nodes, constraints)


# plans


def divided():
    """The model with its last block in a class of its own, and a random plan for it on two tensor ranks."""
    fine = refine_classes(sg(), parse(keep=("layers.2",)))
    return fine, random_plan(fine, pp=1, dp=1, tp=2, microbatches=1, seed=3, split_weights=True)


def test_a_plan_may_divide_the_classes_of_the_graph():
    fine, plan = divided()
    assert plan.segment_kinds != tuple(s.kind for s in sg().segments)
    block, last = plan.layout("block"), plan.layout("block.2")
    assert [op.tensor for op in block.ops] != [op.tensor for op in last.ops]
    placed = place(plan, sg())
    check_strategies(plan, sg())
    assert [placed.ops[name].tensor for name in fine.segments[2].nodes] == [op.tensor for op in block.ops]
    assert [placed.ops[name].tensor for name in fine.segments[3].nodes] == [op.tensor for op in last.ops]


def test_a_plan_may_not_join_classes_of_the_graph():
    fine, _ = divided()
    joined = random_plan(sg(), pp=1, dp=1, tp=2, microbatches=1, seed=3)
    place(joined, sg())
    with pytest.raises(PlanError, match="whose chain of segments is not this model's"):
        place(joined, fine)


def test_every_class_of_a_plan_must_be_legal():
    _, plan = divided()
    last = plan.layout("block.2")
    wrong = [replace(op, tensor=replace(op.tensor, outputs=(PARTIAL,) * len(op.tensor.outputs))) for op in last.ops]
    layouts = tuple(replace(last, ops=tuple(wrong)) if layout == last else layout for layout in plan.layouts)
    with pytest.raises(PlanError, match="cannot run as"):
        check_strategies(replace(plan, layouts=layouts), sg())
