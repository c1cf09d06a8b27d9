"""What a name in a plan means, and who explains it: weights, ops, modules, choices and stages."""

import difflib
from collections.abc import Callable, Iterator, Sequence

from autoplan.errors import InputError
from autoplan.ir import SegmentedGraph
from autoplan.plan.explanation import Explanation
from autoplan.plan.patterns import by_pattern, matches, pattern_of
from autoplan.solver.explain_choice import CHOICES, explain_choice
from autoplan.solver.explain_part import explain_op, explain_weights
from autoplan.solver.explain_stage import explain_stage
from autoplan.solver.reprice import Given
from autoplan.solver.request import Request

_MOST_PARTS = 6
"""Weights of one pattern, or ops of one module, that are explained at once."""
_KINDS = (
    "a weight or a pattern of weights (layers.*.mlp.w1.weight), an op or a module of the model, a choice "
    f"({', '.join(CHOICES)}), or a stage (stage 0)"
)


def explain(
    given: Given, sg: SegmentedGraph, request: Request, name: str, time_limit_s: float, progress: Callable[[str], None]
) -> tuple[Explanation, ...]:
    """Explain what the name means. ``sg`` is the model as traced, ``request`` that of the search.

    Raises InputError with near matches for a name that nothing has.
    """
    if name in CHOICES:
        return (explain_choice(given, sg, request, name, time_limit_s, progress),)
    if name.startswith("stage"):
        return (explain_stage(given, _stage_number(name)),)
    found = tuple(_weights(given, name)) or tuple(_ops(given, name))
    if not found:
        raise InputError(_unknown(given, name))
    return found


def _stage_number(name: str) -> int:
    number = name.removeprefix("stage").strip()
    if not (number.isascii() and number.isdigit()):
        raise InputError(f"{name!r} is no stage: write it as 'stage 0'")
    return int(number)


def _weights(given: Given, name: str) -> Iterator[Explanation]:
    read = {param for names in given.plan.segment_params for param in names}
    names = [param.name for param in given.plan.params if param.name in read and _is(name, param.name)]
    for pattern, members in list(by_pattern(tuple(names)).items())[:_MOST_PARTS]:
        for alike in _alike(given, members):
            yield explain_weights(given, alike[0] if len(alike) == 1 else pattern, alike)


def _is(pattern: str, name: str) -> bool:
    return pattern == name or matches(pattern, name)


def _alike(given: Given, names: Sequence[str]) -> list[list[str]]:
    """Weights that lie alike, of layers that run alike but for the way to recompute."""
    found: dict[object, list[str]] = {}
    for name in names:
        kinds = {s.kind for s in given.tables.sg.segments if f"param:{name}" in s.params}
        found.setdefault((given.plan.param(name).tensor, tuple(sorted(kinds))), []).append(name)
    return list(found.values())


def _ops(given: Given, name: str) -> Iterator[Explanation]:
    """By the name of the node in any segment of its class; of a module, the ops with a choice, the heaviest first."""
    slots: dict[tuple[int, int], list[int]] = {}
    nodes = {node.name: node for node in given.tables.sg.graph.nodes}
    for index, segment in enumerate(given.tables.sg.segments):
        for number, node in enumerate(segment.nodes):
            if node == name or _in_module(nodes[node].module_path, name):
                slots.setdefault((segment.kind, number), []).append(index)
    order = sorted(slots, key=lambda slot: _weight(given, slots[slot][0], slot[1]), reverse=True)
    for slot in order[:_MOST_PARTS]:
        first = given.tables.sg.segments[slots[slot][0]].nodes[slot[1]]
        yield explain_op(given, first, slot[1], slots[slot])


def _in_module(path: str, name: str) -> bool:
    """Whether a module path is the named module, or lies in it; ``*`` stands for a number."""
    depth = len(name.split("."))
    return bool(path) and _is(name, ".".join(path.split(".")[:depth]))


def _weight(given: Given, index: int, number: int) -> tuple[int, float]:
    node, candidate = given.options[index].resolved.nodes[number]
    return (len(node.candidates) > 1) * (1 + node.is_heavy), candidate.total_us


def _unknown(given: Given, name: str) -> str:
    known = dict.fromkeys([*CHOICES, *_names(given)])
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    meant = f"; did you mean {' or '.join(near)}?" if near else ""
    return f"nothing in the plan is called {name!r}{meant}\nA name is {_KINDS}"


def _names(given: Given) -> Iterator[str]:
    for param in given.plan.params:
        yield param.name
        yield pattern_of(param.name)
    for node in given.tables.sg.graph.nodes:
        yield node.name
        yield node.module_path
