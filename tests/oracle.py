"""Exhaustive search, for problems small enough: what the ILP and the MILP must equal.

Written from the definitions, sharing no code with the solver: nested loops and sets.
"""

import itertools
from collections.abc import Iterator

from autoplan.ir import TensorMeta
from autoplan.sharding import Placement, local_shape
from autoplan.solver.problem import Prices, Problem
from autoplan.solver.stages import ChainProblem


def part_bytes(problem: Problem, name: str, placement: Placement) -> int:
    meta = next(v.meta for v in problem.values if v.name == name)
    shape = local_shape(meta.shape, placement, problem.degree, 0)
    return TensorMeta(shape=shape, dtype=meta.dtype).num_bytes


def cost_of(problem: Problem, candidates: tuple[int, ...], params: dict[str, Placement], prices: Prices) -> float:
    """Cost of one full choice: ops + each distinct (value, wanted placement) + parameters + what stays alive."""
    made = dict(params)
    for value in problem.values:
        if value.origin in ("input", "given"):
            made[value.name] = value.sources[0]
    total = 0.0
    wanted = set()
    view_of = {}
    for node, index in zip(problem.nodes, candidates, strict=True):
        candidate = node.candidates[index]
        total += candidate.forward_us + candidate.backward_us + candidate.internal_us
        total += candidate.internal_backward_us
        for result, placement in zip(node.results, candidate.strategy.outputs, strict=True):
            made[result] = placement
            if node.is_view:
                view_of[result] = (node.operands[0], candidate.strategy.inputs[0])
        wanted |= set(zip(node.operands, candidate.strategy.inputs, strict=True))
    wanted |= {(name, place) for name, place in problem.outputs if place is not None}
    for name, place in wanted:
        if made[name] != place:
            move = problem.moves[name, made[name], place]
            total += move.forward_us + move.backward_us
    for value in problem.values:
        if value.origin == "param":
            total += prices.step * value.sync_us[value.sources.index(made[value.name])]
            total += prices.state_us_per_byte * part_bytes(problem, value.name, made[value.name])
    alive = set()
    for node, index in zip(problem.nodes, candidates, strict=True):
        alive |= {_memory_behind(problem, made, view_of, name, place) for name, place in node.candidates[index].saved}
    extra = sum(node.candidates[index].extra_bytes for node, index in zip(problem.nodes, candidates, strict=True))
    total += prices.activation_us_per_byte * extra
    return total + prices.activation_us_per_byte * sum(part_bytes(problem, *storage) for storage in alive - {None})


def _memory_behind(problem, made, view_of, name, place):
    if made[name] != place and problem.moves[name, made[name], place].copies:
        return name, place
    if name in view_of:
        return _memory_behind(problem, made, view_of, *view_of[name])
    origin = next(v.origin for v in problem.values if v.name == name)
    return (name, made[name]) if origin in ("node", "input") else None


def all_choices(
    problem: Problem, fixed: dict[str, Placement]
) -> Iterator[tuple[tuple[int, ...], dict[str, Placement]]]:
    params = [v for v in problem.values if v.origin == "param"]
    places = [[fixed[v.name]] if v.name in fixed else v.sources for v in params]
    for candidates in itertools.product(*(range(len(n.candidates)) for n in problem.nodes)):
        for chosen in itertools.product(*places):
            yield candidates, {v.name: place for v, place in zip(params, chosen, strict=True)}


def best_block_cost(problem: Problem, prices: Prices, fixed: dict[str, Placement]) -> float:
    """Least cost over every choice there is."""
    return min(cost_of(problem, *choice, prices) for choice in all_choices(problem, fixed))


def best_chain_us(chain: ChainProblem) -> float | None:
    """Least step time over every cut and every option per segment; None when nothing fits."""
    kinds = [run for run, length in enumerate(chain.lengths) for _ in range(length)]
    best = None
    for cuts in itertools.combinations(range(1, len(kinds)), len(chain.stages) - 1):
        edges = [0, *cuts, len(kinds)]
        for picks in itertools.product(*(range(len(chain.options[run])) for run in kinds)):
            total = _chain_us(chain, kinds, edges, picks)
            if total is not None and (best is None or total < best):
                best = total
    return best


def _chain_us(chain, kinds, edges, picks):
    times, ends = [], []
    for s, stage in enumerate(chain.stages):
        mine = range(edges[s], edges[s + 1])
        options = [chain.options[kinds[i]][picks[i]] for i in mine]
        held = {g for i in mine for g in chain.shared_of(kinds[i])}
        need = sum(o.state_bytes + stage.in_flight * o.activation_bytes for o in options)
        need += max(o.transient_bytes for o in options) + stage.fixed_bytes
        need += sum(chain.shared[g].state_bytes for g in held)
        if need > chain.memory_bytes:
            return None
        times.append(sum(o.time_us for o in options) + stage.fixed_us)
        ends.append(sum(o.end_us for o in options) + sum(chain.shared[g].end_us for g in held))
    return (chain.num_microbatches - 1) * max(times) + sum(times) + max(ends)
