"""Level 2 as plain data: a chain of segments to be cut into stages, and what any cut costs.

A *run* is a stretch of consecutive segments of one class; an *option* is one way to run a segment of it. Ranks hold
one stage each, or several *chunks*. ``counts[s][r][o]`` segments of run r on stage s use option o.

    step = m T + max(0, beta (sum of the ranks' times - T - what is hidden)) + E + constant

T is the slowest rank's time of one microbatch, E the longest work at the end of a step. The share beta and the rows
that say which parts of a pass the schedule hides in the bubble come from ``plan/schedule.py``; the row that hides
least counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from autoplan.plan.schedule import Hidden

Counts = tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionCost:
    """What one segment costs by one option, on one device."""

    time_us: float
    """Forward and backward of one microbatch, all exposed communication included."""
    end_us: float
    """Once a step: gradient sums and the optimizer."""
    state_bytes: int
    """Parameters, gradients and optimizer states, without shared parameters."""
    activation_bytes: int
    """Per microbatch in flight."""
    transient_bytes: int
    """While it runs; the largest of a rank counts."""
    forward_us: float = 0.0
    """The part of ``time_us`` for the forward pass."""
    weight_us: float = 0.0
    """The part of ``time_us`` for gradients of parameters, which a zero-bubble schedule defers."""
    loose_us: float = 0.0
    """In lower bounds: a part of ``time_us`` of which it is not known to which pass it belongs."""

    def hidden_us(self, row: Hidden) -> float:
        """What a schedule hides of it in the bubble, by one row; what is loose may all be hidden."""
        rest = self.time_us - self.forward_us - self.weight_us - self.loose_us
        return self.loose_us + row.forward * self.forward_us + row.input * rest + row.weight * self.weight_us


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedParam:
    """A parameter that several classes read; every stage that reads it holds it."""

    state_bytes: int
    end_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLimits:
    """What a stage costs before any segment is placed on it."""

    fixed_us: float = 0.0
    """Per microbatch: sends and receives."""
    fixed_bytes: int = 0
    """Per microbatch in flight."""
    forward_us: float = 0.0
    """The part of ``fixed_us`` for the forward pass."""

    def hidden_us(self, row: Hidden) -> float:
        """What a schedule hides of it in the bubble, by one row."""
        return row.forward * self.forward_us + row.input * (self.fixed_us - self.forward_us)


@dataclass(frozen=True, kw_only=True)
class ChainProblem:
    """Everything level 2 needs; no solver object inside."""

    lengths: tuple[int, ...]
    """Segments of each run."""
    options: tuple[tuple[OptionCost, ...], ...]
    """By run."""
    stages: tuple[StageLimits, ...]
    """In chain order."""
    ranks: tuple[tuple[int, ...], ...]
    """Stages of each rank."""
    in_flight: tuple[tuple[tuple[int, ...], ...], ...]
    """Per rank: microbatches that each of its stages holds, at every moment that may be the fullest."""
    num_microbatches: int
    bubble_share: float = 1.0
    bubble_rows: tuple[Hidden, ...] = (Hidden(0.0, 0.0, 0.0),)
    memory_bytes: int
    shared: tuple[SharedParam, ...] = ()
    readers: tuple[tuple[int, ...], ...] = ()
    """Per shared parameter: the runs that read it."""
    contiguous: bool = True
    """Whether a rank with one stage holds consecutive segments; bounds for schedules with chunks leave it open."""
    constant_us: float = 0.0
    """Once a step, whatever is chosen: summing the loss."""
    cuts: tuple[int, ...] | None = None
    """Where stages after the first must begin; None leaves it open."""

    @cached_property
    def num_segments(self) -> int:
        """Segments of the chain."""
        return sum(self.lengths)

    @cached_property
    def sizes(self) -> tuple[int, int]:
        """Least and most segments of a stage. With chunks, stages are alike up to one segment."""
        if len(self.stages) == len(self.ranks):
            return 1, self.num_segments
        return self.num_segments // len(self.stages), -(-self.num_segments // len(self.stages))

    @cached_property
    def rank_of(self) -> tuple[int, ...]:
        """Rank of each stage."""
        found = {stage: rank for rank, stages in enumerate(self.ranks) for stage in stages}
        return tuple(found[stage] for stage in range(len(self.stages)))

    @cached_property
    def most_in_flight(self) -> tuple[int, ...]:
        """Per stage: the most microbatches it ever holds."""
        found = {}
        for rank, stages in enumerate(self.ranks):
            for chunk, stage in enumerate(stages):
                found[stage] = max(counts[chunk] for counts in self.in_flight[rank])
        return tuple(found[stage] for stage in range(len(self.stages)))

    def held(self, used: Sequence[Sequence[int]]) -> tuple[SharedParam, ...]:
        """Shared parameters that a stage with these counts holds."""
        return tuple(
            param for param, runs in zip(self.shared, self.readers, strict=True) if any(sum(used[run]) for run in runs)
        )


def objective_us(chain: ChainProblem, counts: Counts) -> float:
    """The step by these counts."""
    num_ranks = len(chain.ranks)
    times, ends, hidden = [0.0] * num_ranks, [0.0] * num_ranks, [0.0] * len(chain.bubble_rows)
    for stage, used in enumerate(counts):
        rank = chain.rank_of[stage]
        limits = chain.stages[stage]
        times[rank] += limits.fixed_us
        hidden = [all_ + limits.hidden_us(terms) for all_, terms in zip(hidden, chain.bubble_rows, strict=True)]
        ends[rank] += sum(param.end_us for param in chain.held(used))
        for row, numbers in zip(chain.options, used, strict=True):
            for option, number in zip(row, numbers, strict=True):
                times[rank] += number * option.time_us
                ends[rank] += number * option.end_us
                for i, terms in enumerate(chain.bubble_rows):
                    hidden[i] += number * option.hidden_us(terms)
    longest = max(times)
    bubble = chain.bubble_share * (sum(times) - longest - min(hidden))
    return chain.num_microbatches * longest + max(0.0, bubble) + max(ends) + chain.constant_us


def rank_times(chain: ChainProblem, counts: Counts) -> list[float]:
    """Time of one microbatch on each rank."""
    times = [0.0] * len(chain.ranks)
    for stage, used in enumerate(counts):
        times[chain.rank_of[stage]] += chain.stages[stage].fixed_us + sum(
            number * option.time_us
            for row, numbers in zip(chain.options, used, strict=True)
            for option, number in zip(row, numbers, strict=True)
        )
    return times


def rank_bytes(chain: ChainProblem, counts: Counts, rank: int) -> int:
    """Peak bytes of a rank by these counts."""
    state, transient = 0, 0
    kept = []
    for stage in chain.ranks[rank]:
        used, activation = counts[stage], chain.stages[stage].fixed_bytes
        state += sum(param.state_bytes for param in chain.held(used))
        for row, numbers in zip(chain.options, used, strict=True):
            for option, number in zip(row, numbers, strict=True):
                if number:
                    state += number * option.state_bytes
                    activation += number * option.activation_bytes
                    transient = max(transient, option.transient_bytes)
        kept.append(activation)
    fullest = max(sum(n * size for n, size in zip(moment, kept, strict=True)) for moment in chain.in_flight[rank])
    return state + transient + fullest


def overflow_bytes(chain: ChainProblem, counts: Counts) -> int:
    """Bytes by which the fullest rank exceeds the limit; at most 0 when all fit."""
    return max(rank_bytes(chain, counts, rank) for rank in range(len(chain.ranks))) - chain.memory_bytes


def fastest_bound_us(chain: ChainProblem) -> float:
    """A step that no counts beat: every segment by its fastest option, memory left aside."""
    share = shown_share(chain)
    times = [[joint_us(chain, option) for option in row] for row in chain.options]
    longest = longest_bound_us(chain, times)
    return (chain.num_microbatches - share) * longest + share * least_net_us(chain) + chain.constant_us


def least_net_us(chain: ChainProblem) -> float:
    """Least sum of the ranks' times net of what is hidden, memory left aside."""
    rows = (
        sum(
            n * min(o.time_us - o.hidden_us(terms) for o in row)
            for n, row in zip(chain.lengths, chain.options, strict=True)
        )
        + sum(stage.fixed_us - stage.hidden_us(terms) for stage in chain.stages)
        for terms in chain.bubble_rows
    )
    return max(0.0, *rows)


def shown_share(chain: ChainProblem) -> float:
    """The bubble's share beta; 0 on one rank, which has no bubble."""
    return chain.bubble_share if len(chain.ranks) > 1 else 0.0


def joint_us(chain: ChainProblem, option: OptionCost) -> float:
    """Time of a segment with its part of the end of a step: (m - beta) T + E >= (m - beta) x the longest rank of it."""
    return option.time_us + option.end_us / (chain.num_microbatches - shown_share(chain))


def longest_run(chain: ChainProblem) -> int:
    """The run that takes longest by its fastest option."""
    least = [min(joint_us(chain, option) for option in row) for row in chain.options]
    return max(range(len(least)), key=lambda run: (chain.lengths[run] * least[run], -run))


def least_longest_us(chain: ChainProblem) -> float:
    """Lower bound on the slowest rank's time of one microbatch."""
    return longest_bound_us(chain, [[o.time_us for o in row] for row in chain.options])


def longest_bound_us(chain: ChainProblem, times: Sequence[Sequence[float]]) -> float:
    """Lower bound on the slowest rank: an even spread; the fullest share of a run; the best contiguous cut.

    ``times`` has one entry per option of each run. The last needs one stage per rank and every segment by its fastest
    option. It closes most of the gap that fractions of segments leave.
    """
    least = [min(row) for row in times]
    ranks = len(chain.ranks)
    fixed = min(sum(chain.stages[s].fixed_us for s in stages) for stages in chain.ranks)
    total = sum(n * time for n, time in zip(chain.lengths, least, strict=True))
    spread = (total + sum(stage.fixed_us for stage in chain.stages)) / ranks
    fullest = max(-(-n // ranks) * time for n, time in zip(chain.lengths, least, strict=True)) + fixed
    if len(chain.stages) > ranks or ranks == 1 or not chain.contiguous:
        return max(spread, fullest)
    return max(spread, fullest, _least_cut_us(chain.lengths, least, ranks) + fixed)


def _least_cut_us(lengths: Sequence[int], times: Sequence[float], parts: int) -> float:
    """The longest part of the best cut into contiguous parts; found from below to a billionth."""
    total = sum(n * time for n, time in zip(lengths, times, strict=True))
    low, high = max(*times, total / parts), total
    if _num_parts(lengths, times, low) <= parts:
        return low
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if _num_parts(lengths, times, middle) <= parts else (middle, high)
    return low


def _num_parts(lengths: Sequence[int], times: Sequence[float], limit: float) -> int:
    """Parts of at most ``limit`` that a greedy cut needs."""
    count, left = 1, limit
    for length, time in zip(lengths, times, strict=True):
        remaining = length
        while remaining:
            fit = min(remaining, int(left / time * (1 + 1e-12))) if time > 0 else remaining
            if fit == 0:
                count, left = count + 1, limit
                continue
            remaining -= fit
            left -= fit * time
    return count
