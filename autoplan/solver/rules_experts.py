"""Row of the rule table for the experts of a mixture, ``autoplan::experts``.

Operands: hidden (t, h), index (t, k), weights (t, k), first projection (e, 2i, h) or (e, i, h), second (e, h, i).

    tokens         t split; the experts are whole and see a part of their tokens each
    intermediate   i split, within gate and up; every rank has a part of each expert's sum
    experts        e split, with all tokens on every rank: each adds what its own experts give      experts_slice
    exchange       e and t split: tokens travel to the ranks of their experts and back              experts_exchange
"""

from autoplan.sharding import (
    PARTIAL,
    REPLICATE_PARTIAL_GRAD,
    Placement,
    Shard,
    Strategy,
    can_split,
)
from autoplan.solver.experts import EXCHANGE, EXPERTS_OP, SLICE
from autoplan.solver.rules_einsum import Einsum, Letters, Rule, Use


def _experts(use: Use) -> Einsum:
    rows: Letters = ("t", None)
    whole: Letters = (None, None, None)
    return Einsum(inputs=(rows, rows, rows, whole, whole), outputs=(rows,), extra=_splits_of_experts(use))


def _splits_of_experts(use: Use) -> tuple[Strategy, ...]:
    hidden, _, _, first, second = use.inputs
    tokens: tuple[Placement, ...] = (REPLICATE_PARTIAL_GRAD,) * 3
    split_tokens: tuple[Placement, ...] = (Shard(0),) * 3
    experts: tuple[Placement, ...] = (Shard(0), Shard(0))
    found = []
    blocks = first.shape[1] // second.shape[2]
    if can_split(first.shape[1], use.degree, blocks):
        columns = (Shard(1, blocks), Shard(2))
        found.append(Strategy(inputs=(*tokens, *columns), outputs=(PARTIAL,)))
    if can_split(second.shape[0], use.degree):
        found.append(Strategy(inputs=(*tokens, *experts), outputs=(PARTIAL,), local=SLICE))
        if can_split(hidden.shape[0], use.degree):
            found.append(Strategy(inputs=(*split_tokens, *experts), outputs=(Shard(0),), local=EXCHANGE))
    return tuple(found)


EXPERTS: dict[str, Rule] = {EXPERTS_OP: _experts}
