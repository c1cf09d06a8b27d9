"""Exhaustive search, for problems small enough: what the ILP and the MILP must equal.

Written from the definitions, sharing no code with the solver: nested loops and sets; sums and maxima over every
combination of what ranks may do are arrays with one axis per rank.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from autoplan.ir import TensorMeta
from autoplan.sharding import Placement, local_shape
from autoplan.solver.chain import ChainProblem
from autoplan.solver.problem import Prices, Problem


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Filling:
    """One way to run the segments of a stage: times of one microbatch, work at the end, bytes."""

    forward_us: float
    input_us: float
    weight_us: float
    end_us: float
    state_bytes: int
    kept_bytes: int
    """Per microbatch in flight."""
    transient_bytes: int
    picks: object = None
    """What was chosen, for who wants to know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """What the cut of a chain into stages depends on, beside the segments."""

    num_segments: int
    ranks: tuple[tuple[int, ...], ...]
    in_flight: tuple[tuple[tuple[int, ...], ...], ...]
    num_microbatches: int
    bubble_share: float
    bubble_rows: tuple[tuple[float, float, float], ...]
    memory_bytes: int
    cuts: tuple[int, ...] | None = None

    @property
    def num_stages(self) -> int:
        return sum(map(len, self.ranks))


Fill = Callable[[int, Sequence[int]], Sequence[Filling]]
"""Every way to run a stage, given by its number, of a cut, given by its edges."""


def best_cut(pipeline: Pipeline, fill: Fill) -> tuple[float, tuple[int, ...], tuple[Filling, ...]] | None:
    """Least step over every cut and every way to run each stage, with both; None when nothing fits."""
    best = None
    for cuts in itertools.combinations(range(1, pipeline.num_segments), pipeline.num_stages - 1):
        edges = (0, *cuts, pipeline.num_segments)
        if _may_be_cut(pipeline, edges):
            found = _best_of_cut(pipeline, [fill(stage, edges) for stage in range(pipeline.num_stages)])
            if found is not None and (best is None or found[0] < best[0]):
                best = found[0], edges, found[1]
    return best


def _may_be_cut(pipeline: Pipeline, edges: Sequence[int]) -> bool:
    """Ranks with several stages take turns, so these are alike up to one segment."""
    if pipeline.cuts is not None and edges[1:-1] != pipeline.cuts:
        return False
    sizes = [b - a for a, b in itertools.pairwise(edges)]
    return pipeline.num_stages == len(pipeline.ranks) or max(sizes) - min(sizes) <= 1


def _best_of_cut(pipeline: Pipeline, stages: Sequence[Sequence[Filling]]) -> tuple[float, tuple[Filling, ...]] | None:
    ranks = [_fitting(pipeline, rank, [stages[s] for s in mine]) for rank, mine in enumerate(pipeline.ranks)]
    if not all(ranks):
        return None

    def outer(op: np.ufunc, figure: Callable[[Filling], float]) -> np.ndarray:
        return reduce(op.outer, [np.array([sum(map(figure, way)) for way in rank]) for rank in ranks])

    time = outer(np.add, _time)
    longest = outer(np.maximum, _time)
    parts = [outer(np.add, part) for part in (lambda f: f.forward_us, lambda f: f.input_us, lambda f: f.weight_us)]
    hidden = np.min([sum(h * part for h, part in zip(row, parts, strict=True)) for row in pipeline.bubble_rows], axis=0)
    bubble = np.maximum(0.0, pipeline.bubble_share * (time - longest - hidden))
    step = pipeline.num_microbatches * longest + bubble + outer(np.maximum, lambda f: f.end_us)
    where = np.unravel_index(step.argmin(), step.shape)
    by_stage = {
        s: filling
        for mine, rank, at in zip(pipeline.ranks, ranks, where, strict=True)
        for s, filling in zip(mine, rank[at], strict=True)
    }
    return float(step.min()), tuple(by_stage[s] for s in range(pipeline.num_stages))


def _time(filling: Filling) -> float:
    return filling.forward_us + filling.input_us + filling.weight_us


def _fitting(pipeline: Pipeline, rank: int, stages: Sequence[Sequence[Filling]]) -> list[tuple[Filling, ...]]:
    """Every way to run the stages of a rank that its memory holds at every moment."""
    found = []
    for way in itertools.product(*stages):
        need = sum(f.state_bytes for f in way) + max(f.transient_bytes for f in way)
        kept = [sum(n * f.kept_bytes for n, f in zip(moment, way, strict=True)) for moment in pipeline.in_flight[rank]]
        if need + max(kept) <= pipeline.memory_bytes:
            found.append(way)
    return found


def best_chain(chain: ChainProblem) -> float | None:
    """Least step of a chain over every cut and every number of each option; None when nothing fits."""
    kinds = [run for run, length in enumerate(chain.lengths) for _ in range(length)]

    def fill(stage: int, edges: Sequence[int]) -> list[Filling]:
        mine = kinds[edges[stage] : edges[stage + 1]]
        rows = [itertools.combinations_with_replacement(row, mine.count(run)) for run, row in enumerate(chain.options)]
        return [_filling(chain, stage, mine, sum(picks, ())) for picks in itertools.product(*rows)]

    pipeline = Pipeline(
        num_segments=len(kinds),
        ranks=chain.ranks,
        in_flight=chain.in_flight,
        num_microbatches=chain.num_microbatches,
        bubble_share=chain.bubble_share,
        bubble_rows=chain.bubble_rows,
        memory_bytes=chain.memory_bytes,
        cuts=chain.cuts,
    )
    found = best_cut(pipeline, fill)
    return None if found is None else found[0]


def _filling(chain: ChainProblem, stage: int, runs: Sequence[int], picks: tuple) -> Filling:
    shared = [param for param, readers in zip(chain.shared, chain.readers, strict=True) if set(readers) & set(runs)]
    limits = chain.stages[stage]
    return Filling(
        forward_us=limits.forward_us + sum(o.forward_us for o in picks),
        input_us=limits.fixed_us - limits.forward_us + sum(o.time_us - o.forward_us - o.weight_us for o in picks),
        weight_us=sum(o.weight_us for o in picks),
        end_us=sum(o.end_us for o in picks) + sum(param.end_us for param in shared),
        state_bytes=sum(o.state_bytes for o in picks) + sum(param.state_bytes for param in shared),
        kept_bytes=limits.fixed_bytes + sum(o.activation_bytes for o in picks),
        transient_bytes=max(o.transient_bytes for o in picks),
    )
