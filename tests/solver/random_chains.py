"""Random chains of every schedule, small enough for brute force."""

import random
from dataclasses import replace

from autoplan.plan.plan import SCHEDULES, ScheduleKind
from autoplan.plan.schedule import Hidden, allowed, bubble_terms, in_flight, stages_of
from autoplan.solver.chain import ChainProblem, OptionCost, SharedParam, StageLimits, rank_bytes

MIB = 2**20
_MOST_SEGMENTS = 9
_STAGES_FOR_MIXES = 4


def random_chain(seed: int) -> ChainProblem:
    """A chain with whole numbers of microseconds and MiB; about a fifth fit nowhere."""
    rng = random.Random(seed)
    kind, p, v, m = _schedule(rng)
    stages = p * v
    total = rng.randint(stages, max(stages + 1, min(_MOST_SEGMENTS, stages + 4)))
    lengths = _parts(rng, total)
    most = 3 if stages <= _STAGES_FOR_MIXES else 2
    options = tuple(tuple(_option(rng) for _ in range(rng.randint(1, most))) for _ in lengths)
    bubble, send = bubble_terms(kind, p, v), rng.randint(0, 3)
    is_shared = len(lengths) > 1 and rng.random() < 0.4
    chain = ChainProblem(
        lengths=lengths,
        options=options,
        stages=tuple(
            StageLimits(
                fixed_us=send * ((s > 0) + (s < stages - 1)), forward_us=send * (s < stages - 1),
                fixed_bytes=rng.randint(0, 3) * MIB,
            )
            for s in range(stages)
        ),
        ranks=tuple(stages_of(kind, p, v, rank) for rank in range(p)),
        in_flight=tuple(in_flight(kind, p, v, m, rank) for rank in range(p)),
        num_microbatches=m,
        bubble_share=bubble.share,
        bubble_rows=tuple(Hidden(*((p - 1) / p * part for part in row)) for row in bubble.rows),
        memory_bytes=rng.randint(50 + 15 * total, 60 + 80 * total) * MIB,
        shared=(SharedParam(state_bytes=rng.randint(0, 30) * MIB, end_us=rng.randint(0, 9)),) if is_shared else (),
        readers=((0, len(lengths) - 1),) if is_shared else (),
    )  # fmt: skip
    return _just_enough(rng, chain) if p == 1 else chain


def _just_enough(rng: random.Random, chain: ChainProblem) -> ChainProblem:
    """The same with the memory that some choice of options needs to the byte: fractions gain little."""
    counts = []
    for length, row in zip(chain.lengths, chain.options, strict=True):
        picks = [rng.randrange(len(row)) for _ in range(length)]
        counts.append(tuple(map(picks.count, range(len(row)))))
    return replace(chain, memory_bytes=rank_bytes(chain, (tuple(counts),), 0))


def _schedule(rng: random.Random) -> tuple[ScheduleKind, int, int, int]:
    while True:
        kind, p = rng.choice(SCHEDULES), rng.randint(1, 4)
        v = {"1f1b": 1, "zbv": 2}.get(kind) or rng.randint(1, 3)
        m = rng.randint(p, 8)
        fills = m >= (2 * p - 1 if kind == "zbv" else p)
        if fills and p * v < _MOST_SEGMENTS and not allowed(kind, p, v, m) and (kind == "1f1b" or p > 1):
            return kind, p, v, m


def _parts(rng: random.Random, total: int) -> tuple[int, ...]:
    count = rng.randint(1, min(3, total))
    edges = [0, *sorted(rng.sample(range(1, total), count - 1)), total]
    return tuple(b - a for a, b in zip(edges, edges[1:], strict=False))


def _option(rng: random.Random) -> OptionCost:
    forward, inputs, weight = rng.randint(1, 20), rng.randint(1, 20), rng.randint(0, 20)
    return OptionCost(
        time_us=forward + inputs + weight,
        forward_us=forward,
        weight_us=weight,
        end_us=rng.randint(0, 30),
        state_bytes=rng.randint(0, 50) * MIB,
        activation_bytes=rng.randint(0, 50) * MIB,
        transient_bytes=rng.randint(0, 20) * MIB,
    )
