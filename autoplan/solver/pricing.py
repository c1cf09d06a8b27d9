"""A point on a table: everything that is fixed while its stages are priced."""

from autoplan.ir import SegmentedGraph
from autoplan.solver.build import Model, crossing_placement, crossing_values
from autoplan.solver.context import Context
from autoplan.solver.context_cost import prelude_bytes
from autoplan.solver.mesh import Point
from autoplan.solver.problem import local_bytes
from autoplan.solver.setting import Facts, Setting, make_setting
from autoplan.solver.tables import Table, Tables


def setting_at(tables: Tables, facts: Facts, point: Point, table: Table) -> Setting:
    """What is fixed at one point."""
    key = (table.key, point.tp)
    if key not in tables.sizes:
        context, model = tables.context(table.key)
        whole = tables.model(point.microbatch)
        tables.sizes[key] = _kept(whole, context), cut_bytes(model, point.tp, table.key.sequence)
    prelude, cuts = tables.sizes[key]
    return make_setting(
        sg=tables.sg,
        cluster=tables.cluster,
        cost=tables.cost,
        point=point,
        facts=facts,
        prelude_bytes=prelude,
        cut_bytes=cuts,
        sequence=table.key.sequence,
    )


def _kept(model: Model, context: Context | None) -> int:
    """Bytes of what the segments read from the prelude."""
    if context is not None:
        return prelude_bytes(model, context)
    made = {name for node in model.sg.prelude for name in model.nodes[node].results}
    read = {name for segment in model.sg.segments for name in segment.inputs}
    return sum(model.graph.metas[name].num_bytes for name in made & read)


def cut_bytes(model: Model, degree: int, sequence: bool) -> tuple[tuple[int, ...], ...]:
    """For each position of the chain: local bytes of every value made before it and read from it on."""
    sg = model.sg
    last_read, crossing = _crossing(sg)
    found: list[list[int]] = [[] for _ in range(len(sg.segments) + 1)]
    for name in (name for segment in sg.segments for name in segment.outputs if name in crossing):
        meta = model.graph.metas[name]
        place = crossing_placement(meta, degree, sequence)
        for position in range(model.made_in[name] + 1, last_read[name] + 1):
            found[position].append(local_bytes(meta, place, degree))
    return tuple(map(tuple, found))


def _crossing(sg: SegmentedGraph) -> tuple[dict[str, int], frozenset[str]]:
    return {name: i for i, segment in enumerate(sg.segments) for name in segment.inputs}, crossing_values(sg)
