"""Why a weight lies, or an op runs, as it does: every other way with the price of the whole plan."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from autoplan.plan.explanation import Alternative, Explanation
from autoplan.plan.rows import layer_groups
from autoplan.plan.words import bytes_text, count_text, data_words, share_text, tensor_words, time_text
from autoplan.sharding import Placement
from autoplan.solver.assemble import param_name
from autoplan.solver.block import alternatives
from autoplan.solver.forced import (
    Force,
    Forced,
    best_forced,
    chosen_numbers,
    comm_us,
    compute_us,
    held_params,
    layer_prices,
    ranked,
)
from autoplan.solver.reprice import Given
from autoplan.solver.stagecost import in_class, param_of
from autoplan.solver.tables import Option

Fact = tuple[str, str]
_MOST = 8
"""Alternatives that are priced with the whole plan."""
_MOST_TIMES_FASTER = 10.0
_ONE = 1e-4
_NOTICED = 1e-4
"""Share of the step above which a difference is told."""
_IN_LAYERS = ("compute", "tensor communication")


def explain_weights(given: Given, subject: str, names: Sequence[str]) -> Explanation:
    """Why these weights, which play one role in alike layers, lie as they do on the tensor axis."""
    slots = _slots(given, names)
    first = min(slots)
    option, name = given.options[first], slots[first][0]
    chosen = option.resolved.sources[name]
    facts = tuple(_weight_facts(given, names, slots))
    if option.resolved.problem.degree == 1:
        return _explanation(given, f"weight {subject}", _whole_words(), facts, [], ())
    places = [place for place in _sources(given, slots) if place != chosen]
    costs = _weight_costs(given, slots)
    places.sort(key=lambda place: (costs[place], str(place)))
    found = []
    for place in places[:_MOST]:
        forces = {index: Force(params=tuple((each, place) for each in values)) for index, values in slots.items()}
        found.append((tensor_words(place), best_forced(given, forces)))
    extra = tuple((tensor_words(place), costs[place] - costs[chosen]) for place in places[_MOST:])
    return _explanation(given, f"weight {subject}", tensor_words(chosen), facts, found, extra)


def _slots(given: Given, names: Sequence[str]) -> dict[int, tuple[str, ...]]:
    """Segments that read the weights, with the names these have in the first segment of the class."""
    sg, wanted = given.tables.sg, {f"param:{name}" for name in names}
    found = {}
    for index, segment in enumerate(sg.segments):
        mine = [name for name in segment.params if name in wanted]
        if mine:
            found[index] = in_class(sg, index, mine)
    return found


def _sources(given: Given, slots: Mapping[int, tuple[str, ...]]) -> list[Placement]:
    """Placements that suit every reader."""
    found: list[Placement] = []
    for number, (index, values) in enumerate(slots.items()):
        problem = given.options[index].resolved.problem
        for value in values:
            mine = next(v.sources for v in problem.values if v.name == value)
            found = list(mine) if not number else [place for place in found if place in mine]
    return found


def _weight_costs(given: Given, slots: Mapping[int, tuple[str, ...]]) -> dict[Placement, float]:
    """Least objective of the layers with each placement, one layer per option."""
    prices, total = layer_prices(given)[0], defaultdict[Placement, float](float)
    once = {given.options[index].name: index for index in sorted(slots, reverse=True)}
    for index in once.values():
        fixed = {name: place for name, place in held_params(given, index).items() if name not in slots[index]}
        found = dict(alternatives(given.options[index].resolved.problem, prices, fixed).params)
        for value in slots[index]:
            for place, cost in found[value]:
                total[place] += cost
    return dict(total)


def _weight_facts(given: Given, names: Sequence[str], slots: Mapping[int, tuple[str, ...]]) -> Iterator[Fact]:
    first = min(slots)
    option, value = given.options[first], slots[first][0]
    shape = given.tables.sg.graph.metas[f"param:{names[0]}"]
    several = f", {len(names)} of them" if len(names) > 1 else ""
    yield "shape", f"{shape}{several}"
    nodes = {node.name: node for node in given.tables.sg.graph.nodes}
    readers = [nodes[node.name].where for node, _ in option.resolved.nodes if value in node.operands]
    yield "read by", "; ".join(readers) or "nothing"
    held = param_of(given.setting, option, value)
    yield "data ranks", f"{given.plan.data}: {data_words(given.plan.param(names[0]).data)}"
    yield "held", f"{bytes_text(held.kept)} on a device" + (f" of {bytes_text(shape.num_bytes)}" if held.kept else "")
    yield from _where(given, list(slots))


def explain_op(given: Given, subject: str, number: int, segments: Sequence[int]) -> Explanation:
    """Why the op of that number in these alike segments runs as it does on the tensor axis."""
    first = segments[0]
    option = given.options[first]
    node, candidate = option.resolved.nodes[number]
    facts = tuple(_op_facts(given, number, segments))
    if option.resolved.problem.degree == 1:
        return _explanation(given, f"op {subject}", _whole_words(), facts, [], ())
    prices, fixed = layer_prices(given)[0], held_params(given, first)
    costs = [cost for _, cost in alternatives(option.resolved.problem, prices, fixed).nodes[number]]
    chosen = chosen_numbers(option.resolved)[number]
    order = ranked(costs, chosen, len(costs))
    words = [str(each.strategy) for each in node.candidates]
    found = [
        (words[i], best_forced(given, {index: Force(node=(number, i)) for index in segments})) for i in order[:_MOST]
    ]
    extra = tuple((words[i], costs[i] - costs[chosen]) for i in order[_MOST:])
    return _explanation(given, f"op {subject}", str(candidate.strategy), facts, found, extra)


def _op_facts(given: Given, number: int, segments: Sequence[int]) -> Iterator[Fact]:
    option = given.options[segments[0]]
    node, candidate = option.resolved.nodes[number]
    metas = given.tables.context(given.key)[1].graph.metas
    op = next(each for each in given.tables.sg.graph.nodes if each.name == node.name)
    yield "op", op.where
    yield "operands", ", ".join(f"{param_name(name)} {metas[name]}" for name in node.operands) or "none"
    inside = candidate.internal_us + candidate.internal_backward_us
    sent = f", {time_text(inside)} of communication inside it" if inside else ""
    compute = candidate.forward_us + candidate.backward_us
    yield "time", f"{time_text(compute)} of compute a layer and microbatch{sent}"
    moves = [option.resolved.move(key) for key in option.resolved.moves if key[0] in (*node.operands, *node.results)]
    moved = Counter(each.kind.value for move in moves for each in (move.forward, move.backward) if each is not None)
    yield "collectives", ", ".join(count_text(n, kind) for kind, n in sorted(moved.items())) or "none around it"
    yield from _where(given, segments)


def _where(given: Given, segments: Sequence[int]) -> Iterator[Fact]:
    wanted, kinds = set(segments), given.plan.segment_kinds
    labels = []
    for stage in given.plan.stages:
        mine = {(kinds[i], kinds[:i].count(kinds[i])) for i in range(stage.start, stage.end) if i in wanted}
        names = [g for g in layer_groups(given.plan, stage)]
        for group in names:
            kind = given.plan.kind_names.index(group.kind)
            if any((kind, n) in mine for n in group.numbers):
                labels.append(f"{group.label} (recompute {group.recompute})")
    yield "layers", "; ".join(dict.fromkeys(labels))


def _whole_words() -> str:
    return "whole: tp is 1, so nothing is split and there is nothing to choose (see explain tp)"


def _explanation(
    given: Given, subject: str, chosen: str, facts: tuple[tuple[str, str], ...],
    found: Sequence[tuple[str, Forced]], extra: Sequence[tuple[str, float]],
) -> Explanation:  # fmt: skip
    """Fitting ones first, fastest first; then those that do not fit."""
    ordered = sorted(found, key=lambda pair: (not pair[1].fits, pair[1].step.total_us))
    if extra:
        least = min(cost for _, cost in extra)
        more = f"{len(extra)} further ways take at least {time_text(max(0.0, least))} more a layer and microbatch"
        facts = (*facts, ("left out", more))
    return Explanation(
        subject=subject,
        chosen=chosen,
        facts=facts,
        step_us=given.step.total_us,
        peak_bytes=given.step.peak_bytes,
        alternatives=tuple(_alternative(given, words, forced) for words, forced in ordered),
        changes=tuple(text for words, forced in ordered for text in _change(given, words, forced)),
    )


def _alternative(given: Given, words: str, forced: Forced) -> Alternative:
    return Alternative(
        words=words,
        step_us=forced.step.total_us,
        peak_bytes=forced.step.peak_bytes,
        reason="; ".join(_reasons(given, forced)),
    )


def _reasons(given: Given, forced: Forced) -> Iterator[str]:
    if not forced.fits:
        yield f"does not fit: short by {bytes_text(forced.step.overflow_bytes)}"
    compute = compute_us(forced.after) - compute_us(forced.before)
    comm = comm_us(forced.after) - comm_us(forced.before)
    for name, amount in (("compute", compute), ("communication", comm)):
        if abs(amount) > _ONE:
            yield f"{time_text(abs(amount))} {'more' if amount > 0 else 'less'} {name} a layer and microbatch"
    yield from _collectives(forced.before, forced.after)
    alike = abs(compute) <= _ONE and abs(comm) <= _ONE
    yield from _of_step(given, forced, everything=alike)
    faster = 1 - forced.step.total_us / given.step.total_us
    if forced.fits and faster > _ONE:
        yield f"{share_text(faster)} faster: {left_open(given, faster)}"
    elif alike and abs(faster) <= _ONE:
        yield "as good by the cost model"


def _of_step(given: Given, forced: Forced, *, everything: bool) -> Iterator[str]:
    """Causes beside the layers themselves in which the step differs noticeably."""
    before = dict(given.step.amounts)
    for cause, amount in forced.step.amounts:
        more = amount - before[cause]
        if abs(more) > _NOTICED * given.step.total_us and (everything or cause not in _IN_LAYERS):
            yield f"{time_text(abs(more))} {'more' if more > 0 else 'less'} {cause} a step"


def left_open(given: Given, faster: float) -> str:
    """How a plan can be better by that share than one that was searched."""
    proof = given.plan.proof
    if proof.status == "priced":
        return "the plan was given, not searched"
    if faster <= proof.gap(given.plan.step.total):
        return "within the gap that the search left open"
    return "a mix of ways that the search did not weigh, since it takes each layer at a few prices of memory only"


def _collectives(before: Option, after: Option) -> Iterator[str]:
    counts, sizes = Counter[str](), Counter[str]()
    for sign, option in ((-1, before), (1, after)):
        for each in option.cost.collectives:
            key = f"{each.axis} {each.kind.value}"
            counts[key] += sign * each.count
            sizes[key] += sign * each.num_bytes
    for key in sorted(counts):
        if counts[key]:
            size = f" ({bytes_text(abs(sizes[key]))})" if sizes[key] else ""
            yield f"{abs(counts[key])} {key} {'more' if counts[key] > 0 else 'fewer'}{size}"
        elif sizes[key]:
            yield f"{bytes_text(abs(sizes[key]))} {'more' if sizes[key] > 0 else 'less'} in {key}"


def _change(given: Given, words: str, forced: Forced) -> Iterator[str]:
    """When it would be as good, where one number says it."""
    large = forced.too_large
    if large is not None and large.total_us < given.step.total_us * (1 - _ONE):
        short, faster = bytes_text(large.overflow_bytes), share_text(1 - large.total_us / given.step.total_us)
        yield f"With {short} more memory a device, '{words}' would fit and be {faster} faster."
    if not forced.fits:
        return
    faster_by = 1 - forced.step.total_us / given.step.total_us
    compute = compute_us(forced.after) - compute_us(forced.before)
    comm = comm_us(forced.after) - comm_us(forced.before)
    if faster_by > -_ONE or compute * comm >= 0:
        return
    times = -comm / compute
    if comm > 0 and 1 < times <= _MOST_TIMES_FASTER:
        yield f"With links {times:.3g} times as fast inside a layer, '{words}' would take no longer."
    if comm < 0 and 1 < 1 / times <= _MOST_TIMES_FASTER:
        yield f"With links {1 / times:.3g} times as slow inside a layer, '{words}' would take no longer."
