"""What no candidate can beat, found before its tables exist.

A family's step is at least its microbatches x the fastest way through the longest stage, were compute split evenly over
the pipeline, context and tensor ranks without communication. Where a table of the same tensor degree is known for more
samples or less of a context split, its time per sample is a bound as well: work and messages of half the size take at
least half as long, which every cost model must grant (``CostModel``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autoplan.plan.memory import ParamBytes, state_causes
from autoplan.plan.plan import ScheduleKind
from autoplan.plan.schedule import Hidden, bubble_terms
from autoplan.solver.chain import ChainProblem, OptionCost, StageLimits
from autoplan.solver.dual import lower_bound_us
from autoplan.solver.mesh import Point
from autoplan.solver.places import flying_of, ranks_of
from autoplan.solver.points import Family, Space
from autoplan.solver.setting import Facts, data_axis_of
from autoplan.solver.tables import Option, Table, TableKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Rough:
    """A lower bound of what one option of a class costs in a family, in whatever way parameters are held."""

    time_us: float
    forward_us: float
    weight_us: float
    loose_us: float
    activation_bytes: float
    transient_bytes: float


Way = tuple[ScheduleKind, int]
"""Schedule and chunks."""
RoughRows = tuple[tuple[Rough, ...], ...]
"""By class."""


def rough_rows(table: Table) -> RoughRows:
    """Options of every class as a table has them."""
    return tuple(
        tuple(
            Rough(
                time_us=_total_us(option),
                forward_us=option.cost.forward_us + option.cost.forward_comm_us,
                weight_us=option.cost.weight_us,
                loose_us=0.0,
                activation_bytes=option.cost.activation_bytes,
                transient_bytes=option.cost.transient_bytes,
            )
            for option in options
        )
        for options in table.options
    )


def split_rows(whole: Table, ranks: int, least_us: Sequence[float]) -> RoughRows:
    """What options can be at best when the work of ``whole`` is split over so many ranks.

    A class takes at least ``least_us`` and, by a way to recompute, that much more as the way adds on one device; memory
    is split evenly. What exceeds the even split of compute is communication, of either pass.
    """
    found = []
    for options, least in zip(whole.options, least_us, strict=True):
        fastest = min(map(_total_us, options))
        found.append(
            tuple(
                Rough(
                    time_us=least + (_total_us(option) - fastest) / ranks,
                    forward_us=option.cost.forward_us / ranks,
                    weight_us=option.cost.weight_us / ranks,
                    loose_us=max(0.0, least - fastest / ranks),
                    activation_bytes=option.cost.activation_bytes / ranks,
                    transient_bytes=option.cost.transient_bytes / ranks,
                )
                for option in options
            )
        )
    return tuple(found)


def _total_us(option: Option) -> float:
    cost = option.cost
    return cost.forward_us + cost.backward_us + cost.forward_comm_us + cost.backward_comm_us


def schedule_chain(space: Space, family: Family, rows: RoughRows, way: Way, send_us: float) -> ChainProblem:
    """What no way to hold parameters can beat by a schedule, with rows from the family's own table; end apart."""
    schedule, chunks = way
    pp, m = family.degrees.pp, family.num_microbatches
    bubble = bubble_terms(schedule, pp, chunks)
    share = (pp - 1) / pp
    last = pp * chunks - 1
    return replace(
        _chain(space, family, rows),
        stages=tuple(
            StageLimits(fixed_us=send_us * ((s > 0) + (s < last)), forward_us=send_us * (s < last))
            for s in range(last + 1)
        ),
        ranks=ranks_of(schedule, pp, chunks),
        in_flight=flying_of(schedule, pp, chunks, m),
        bubble_share=bubble.share,
        bubble_rows=tuple(Hidden(*(share * part for part in row)) for row in bubble.rows),
    )


def family_memory_us(
    space: Space, family: Family, rows: RoughRows, ways: Sequence[Way], flying: tuple[int, ...], send_us: float
) -> float:
    """A step that nothing in a family beats by any of some schedules, with rows that only bound; end apart.

    The slowest rank is bounded once for schedules with chunks and once for those without, whose ranks hold consecutive
    segments, with what is in flight by the schedule that holds least. Each schedule adds what its ranks send at least
    (in a V the first rank has both ends of the chain), and its bubble as far as what it hides is known: rows that hide
    no part more than once.
    """
    pp, m = family.degrees.pp, family.num_microbatches
    chain, longest = _chain(space, family, rows, flying), dict[bool, float]()
    parts = _least_parts(space, rows)
    best = float("inf")
    for schedule, chunks in ways:
        has_chunks = chunks > 1
        if has_chunks not in longest:
            longest[has_chunks] = lower_bound_us(replace(chain, contiguous=not has_chunks), whole=False) / m
        bubble = bubble_terms(schedule, pp, chunks)
        share = bubble.share if pp > 1 else 0.0
        sent = send_us * (2 * chunks - (2 if schedule == "zbv" else 1)) if pp > 1 else 0.0
        net = max(
            (sum(max(0.0, 1 - (pp - 1) / pp * h) * part for h, part in zip(row, parts, strict=True))
             for row in bubble.rows if max(row) <= 1), default=0.0,
        )  # fmt: skip
        best = min(best, (m - share) * (longest[has_chunks] + sent) + share * net)
    return best


def _least_parts(space: Space, rows: RoughRows) -> tuple[float, float, float]:
    """Least time of all segments' forward passes, input gradients and parameter gradients."""
    forward = input_ = weight = 0.0
    for kind, count in enumerate(space.class_counts):
        forward += count * min(r.forward_us for r in rows[kind])
        weight += count * min(r.weight_us for r in rows[kind])
        input_ += count * min(r.time_us - r.forward_us - r.weight_us - r.loose_us for r in rows[kind])
    return forward, input_, weight


def _chain(space: Space, family: Family, rows: RoughRows, flying: tuple[int, ...] = ()) -> ChainProblem:
    """A family as a chain without a bubble, one stage per rank."""
    states = least_class_states(space, family)
    return ChainProblem(
        lengths=tuple(length for _, length in space.runs),
        options=tuple(tuple(_cost(rough, states[kind]) for rough in rows[kind]) for kind, _ in space.runs),
        stages=(StageLimits(),) * len(flying),
        ranks=tuple((rank,) for rank in range(len(flying))),
        in_flight=tuple(((count,),) for count in flying),
        num_microbatches=family.num_microbatches,
        bubble_share=0.0,
        memory_bytes=space.cluster.memory_bytes,
    )


def _cost(rough: Rough, state_bytes: int) -> OptionCost:
    return OptionCost(
        time_us=rough.time_us,
        forward_us=rough.forward_us,
        weight_us=rough.weight_us,
        loose_us=rough.loose_us,
        end_us=0.0,
        state_bytes=state_bytes,
        activation_bytes=int(rough.activation_bytes),
        transient_bytes=int(rough.transient_bytes),
    )


def least_class_states(space: Space, family: Family) -> tuple[int, ...]:
    """Bytes of states of a segment of each class, split over all ranks as far as any data mode does.

    Parameters that several segments share count nowhere. With experts every byte counts as if it were an expert's.
    """
    facts, ranks = space.facts, family.degrees.data_ranks
    kept = 0 if space.request.offload else facts.states
    share = (facts.held + facts.gradient + kept) / (facts.held * ranks)
    if family.num_microbatches > 1 and not space.num_experts and ranks > 1:
        gathered = (facts.held + kept) / (facts.held * ranks) + facts.gradient / facts.held
        share = min(gathered, 1 + (facts.gradient + kept) / (facts.held * ranks))
    return tuple(int(num_bytes / family.degrees.tp * share) for num_bytes in facts.class_params)


def family_bound_us(counts: Sequence[int], times: Sequence[float], family: Family) -> float:
    """The step, from a lower bound of each class's time on one microbatch."""
    pp = family.degrees.pp
    total = sum(n * time for n, time in zip(counts, times, strict=True))
    fullest = max(-(-n // pp) * time for n, time in zip(counts, times, strict=True))
    return family.num_microbatches * max(total / pp, fullest)


def fastest_us(table: Table) -> tuple[float, ...]:
    """Each class by its fastest option, communication included."""
    return tuple(min(map(_total_us, options)) for options in table.options)


def implied_us(
    known: Mapping[TableKey, tuple[float, ...]], key: TableKey, whole: tuple[float, ...]
) -> tuple[float, ...]:
    """Lower bound of each class's time at a key whose table is not made, from those that are.

    ``whole`` is the time on one device at this microbatch.
    """
    best = [time / (key.tp * key.cp) for time in whole]
    for other, times in known.items():
        nested = other.cp == 1 or (other.cp, other.cp_per_node) == (key.cp, key.cp_per_node)
        if nested and (other.tp, other.sequence) == (key.tp, key.sequence) and other.microbatch % key.microbatch == 0:
            share = key.microbatch * other.cp / (other.microbatch * key.cp)
            best = [max(mine, share * time) for mine, time in zip(best, times, strict=True)]
    return tuple(best)


def least_state_bytes(facts: Facts, point: Point) -> int:
    """Bytes that the states of all parameters need on the fullest device, however they are split."""
    parts = point.pp * point.tp * point.expert
    shared = parts * point.shards
    even = ParamBytes(
        whole=facts.whole_bytes // parts,
        trainable=facts.trainable_bytes // parts,
        kept=facts.whole_bytes // shared,
        kept_trainable=facts.trainable_bytes // shared,
    )
    return sum(state_causes(even, data_axis_of(point, facts)))
