"""The whole search by brute force: every point, boundary, cut and option per segment, priced as the plan is.

What a plan costs is the solver's own definition: tables of options, prices of segments, bytes of ranks. How the best
one is found is not: nothing here bounds, constructs, solves or leaves out.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import isclose

from oracle import Filling, Pipeline, best_cut

from autoplan.ir import SegmentedGraph
from autoplan.plan.memory import running_causes, state_causes
from autoplan.plan.schedule import bubble_terms, in_flight, stages_of
from autoplan.sharding import CollectiveKind
from autoplan.solver.mesh import Point, groups_of
from autoplan.solver.milp import SolveState
from autoplan.solver.points import Space, all_points
from autoplan.solver.pricing import setting_at
from autoplan.solver.search import splits_work
from autoplan.solver.setting import Setting
from autoplan.solver.stagecost import SegmentCost, StageCost, holders, in_class, segment_cost, stage_cost
from autoplan.solver.step import ROUNDING_BYTES, Step, loss_bytes, step_from
from autoplan.solver.tables import Option, Table, TableKey, Tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The best plan of one point and boundary."""

    point: Point
    sequence: bool
    step: Step


def every_point(tables: Tables, space: Space) -> Iterator[Found]:
    """The best plan of every point and boundary that has one."""
    kept: dict[object, list[Filling]] = {}
    for point in all_points(space):
        for sequence in (False, True) if point.tp > 1 else (False,):
            step = _best_step(tables, space, point, sequence, kept)
            if step is not None:
                yield Found(point=point, sequence=sequence, step=step)


def best_of(found: Sequence[Found], *, pins_tensor: bool) -> Found | None:
    """The fastest; one whose tensor axis splits nothing only where there is no other."""
    useful = [each for each in found if pins_tensor or splits_work(each.step)]
    return min(useful or found, key=lambda each: each.step.total_us, default=None)


def _best_step(
    tables: Tables, space: Space, point: Point, sequence: bool, kept: dict[object, list[Filling]]
) -> Step | None:
    per_node = groups_of(point, tables.cluster).context.per_node
    key = TableKey(tp=point.tp, cp=point.cp, cp_per_node=per_node, microbatch=point.microbatch, sequence=sequence)
    table = tables.table(key)
    setting = setting_at(tables, space.facts, point, table)
    cuts = space.request.cuts
    if cuts is not None and len(cuts) != point.num_stages - 1:
        return None
    found = best_cut(_pipeline(setting, cuts), _Fill(setting=setting, table=table, kept=kept))
    if found is None:
        return None
    step = step_from(setting, [filling.picks for filling in found[2]], SolveState.OPTIMAL)
    assert isclose(step.total_us, found[0] + _loss_us(setting), rel_tol=1e-9), "the plan is not priced as it was found"
    assert step.peak_bytes <= setting.cluster.memory_bytes - ROUNDING_BYTES
    return step


def _loss_us(setting: Setting) -> float:
    """Summing the loss over the data ranks and sending it down the pipeline: the same for every cut."""
    summed = setting.collective_us(CollectiveKind.ALL_REDUCE, loss_bytes(setting), setting.groups.data)
    return summed + setting.collective_us(CollectiveKind.BROADCAST, loss_bytes(setting), setting.groups.pipeline)


def _pipeline(setting: Setting, cuts: tuple[int, ...] | None) -> Pipeline:
    point = setting.point
    pp, chunks, share = point.pp, point.chunks, (point.pp - 1) / point.pp
    bubble = bubble_terms(point.schedule, pp, chunks)
    return Pipeline(
        num_segments=len(setting.sg.segments),
        ranks=tuple(stages_of(point.schedule, pp, chunks, rank) for rank in range(pp)),
        in_flight=tuple(in_flight(point.schedule, pp, chunks, point.num_microbatches, rank) for rank in range(pp)),
        num_microbatches=point.num_microbatches,
        bubble_share=bubble.share,
        bubble_rows=tuple(tuple(share * part for part in row) for row in bubble.rows),
        memory_bytes=setting.cluster.memory_bytes - ROUNDING_BYTES,
        cuts=cuts,
    )


@dataclass(slots=True, kw_only=True)
class _Fill:
    """Every way to run a stage: options as multisets per class, each priced as a stage of the plan."""

    setting: Setting
    table: Table
    kept: dict[object, list[Filling]]

    def __call__(self, stage: int, edges: Sequence[int]) -> list[Filling]:
        start, end = edges[stage], edges[stage + 1]
        tied = tuple((name, len(stages)) for name, stages in holders(self.setting.sg, edges).items() if len(stages) > 1)
        alike = replace(self.setting.point, schedule="1f1b", chunks=1)
        key = alike, self.setting.sequence, start, end, tied
        if key not in self.kept:
            ways = _choices(self.setting.sg, self.table, start, end)
            self.kept[key] = _priced(self.setting, ways, stage, edges)
        return self.kept[key]


def _choices(sg: SegmentedGraph, table: Table, start: int, end: int) -> list[tuple[Option, ...]]:
    """Options of the segments of a stretch; which of two equal segments has which does not matter."""
    kinds = [segment.kind for segment in sg.segments[start:end]]
    present = sorted(set(kinds))
    rows = [itertools.combinations_with_replacement(table.options[kind], kinds.count(kind)) for kind in present]
    found = []
    for picks in itertools.product(*rows):
        left = {kind: list(mine) for kind, mine in zip(present, picks, strict=True)}
        found.append(tuple(left[kind].pop() for kind in kinds))
    return found


def _priced(setting: Setting, ways: list[tuple[Option, ...]], stage: int, edges: Sequence[int]) -> list[Filling]:
    """Every way as a sum over its segments; what the stage adds is the same for all ways and taken from one."""
    one = stage_cost(setting, ways[0], stage, edges)
    read = Counter(name for segment in setting.sg.segments[one.start : one.end] for name in segment.params)
    places = [
        (in_class(setting.sg, index, owned), in_class(setting.sg, index, [name for name in owned if read[name] > 1]))
        for index, owned in enumerate(one.owned, start=one.start)
    ]
    alone: dict[object, Filling] = {}
    found = []
    for way in ways:
        parts = [_added(setting, one)]
        for option, place in zip(way, places, strict=True):
            if (option.name, place) not in alone:
                alone[option.name, place] = _of_segment(setting, segment_cost(setting, option, *place))
            parts.append(alone[option.name, place])
        found.append(_sum(parts, way))
    return found


def _added(setting: Setting, stage: StageCost) -> Filling:
    """What a stage costs beside its segments."""
    return Filling(
        forward_us=stage.send_us[0] + stage.held_us[0],
        input_us=stage.send_us[1] + stage.held_us[1],
        weight_us=0.0,
        end_us=stage.tied_us + stage.held_us[2],
        state_bytes=stage.memory.held_bytes if setting.data_axis.gathers else 0,
        kept_bytes=setting.prelude_bytes,
        transient_bytes=0,
    )


def _of_segment(setting: Setting, cost: SegmentCost) -> Filling:
    return Filling(
        forward_us=cost.forward_us + cost.forward_comm_us + cost.forward_data_us,
        input_us=cost.backward_us - cost.weight_us + cost.backward_comm_us + cost.backward_data_us,
        weight_us=cost.weight_us,
        end_us=cost.end_us,
        state_bytes=sum(state_causes(cost.memory.params, setting.data_axis)),
        kept_bytes=cost.memory.activation_bytes,
        transient_bytes=sum(running_causes(cost.memory, setting.data_axis)),
    )


def _sum(parts: Sequence[Filling], way: tuple[Option, ...]) -> Filling:
    return Filling(
        forward_us=sum(part.forward_us for part in parts),
        input_us=sum(part.input_us for part in parts),
        weight_us=sum(part.weight_us for part in parts),
        end_us=sum(part.end_us for part in parts),
        state_bytes=sum(part.state_bytes for part in parts),
        kept_bytes=sum(part.kept_bytes for part in parts),
        transient_bytes=max(part.transient_bytes for part in parts),
        picks=way,
    )
