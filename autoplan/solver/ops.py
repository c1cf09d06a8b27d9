"""Every op of a plan with its work and its estimate, from the same work that priced the plan."""

from collections import Counter
from collections.abc import Callable, Iterator

from autoplan.cost import Estimate, Work
from autoplan.plan.ops import OpPrice, Pass
from autoplan.plan.words import count_text
from autoplan.solver.build import node_works
from autoplan.solver.problem import NodeProblem, local_meta
from autoplan.solver.reprice import Given
from autoplan.solver.tables import Option
from autoplan.solver.update import accumulate_work


def priced_ops(given: Given, estimate: Callable[[Work], Estimate]) -> tuple[OpPrice, ...]:
    """All passes of all ops and the adding up of gradients, dearest in a step first: the compute of all stages.

    Moves between ops and the optimizer are not among them.
    """
    segments: dict[str, list[int]] = {}
    for index, option in enumerate(given.options):
        segments.setdefault(option.name, []).append(index)
    found = [row for mine in segments.values() for row in _of_option(given, given.options[mine[0]], mine, estimate)]
    found += _accumulated(given, estimate)
    return tuple(sorted(found, key=lambda row: (-row.total_us, row.where, row.during)))


def _of_option(
    given: Given, option: Option, segments: list[int], estimate: Callable[[Work], Estimate]
) -> Iterator[OpPrice]:
    _, model = given.tables.context(given.key)
    axis, microbatches = given.tables.axis(given.key.tp), given.setting.point.num_microbatches
    for problem, candidate in option.resolved.nodes:
        node = model.nodes[problem.name]
        metas = model.metas_for(node)
        reads = zip(node.operands, candidate.strategy.inputs, strict=True)
        shapes = ", ".join(str(local_meta(metas[name], place, axis)) for name, place in reads)
        forward, backward = node_works(model, node, candidate.strategy, axis)
        for during, work in _passes(option, problem, forward, backward):
            yield OpPrice(
                op=node.op,
                where=node.where,
                layers=f"{count_text(len(segments), option.name.partition('.')[0])}, recompute {option.recompute}",
                during=during,
                shapes=shapes,
                flops=work.flops,
                num_bytes=work.num_bytes,
                estimate=estimate(work),
                count=len(segments) * microbatches,
            )


def _passes(
    option: Option, node: NodeProblem, forward: Work | None, backward: Work | None
) -> Iterator[tuple[Pass, Work]]:
    again = option.recompute == "full" or (option.recompute == "selective" and not node.is_heavy)
    if forward is not None:
        yield "forward", forward
        if again:
            yield "again", forward
    if backward is not None:
        yield "backward", backward


def _accumulated(given: Given, estimate: Callable[[Work], Estimate]) -> Iterator[OpPrice]:
    """Gradients of a microbatch added to those of the ones before, by segments of equal parameters."""
    step = given.step
    found: Counter[tuple[str, Work]] = Counter()
    for stage in step.stages:
        for option, segment in zip(stage.options, stage.segments, strict=True):
            work = accumulate_work(step.setting, segment.memory.params)
            if work is not None:
                found[option.name.partition(".")[0], work] += 1
    for (kind, work), number in found.items():
        yield OpPrice(
            op="accumulate",
            where="gradients added up over microbatches",
            layers=count_text(number, kind),
            during="backward",
            shapes=f"{work.flops:,} gradients",
            flops=work.flops,
            num_bytes=work.num_bytes,
            estimate=estimate(work),
            count=number * step.setting.point.num_microbatches,
        )
