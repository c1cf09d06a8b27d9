"""Experts split over ranks with their tokens exchanged, on real ranks; the other splits need no communication."""

import pytest
from expert_jobs import Case, exchanged_experts

from autoplan.cluster import Group
from autoplan.ir import OpNode, Ref, TensorMeta
from autoplan.sharding import REPLICATE, Shard, Strategy
from autoplan.solver.experts import internal_collectives

pytestmark = pytest.mark.multiproc


@pytest.mark.parametrize("size", [2, 3])
def test_an_exchange_gives_the_whole_op(pools, size: int) -> None:
    """... with three all-to-alls forward and two backward, as the solver counts."""
    cases = (
        Case(tokens=6, experts=6),
        Case(tokens=5, experts=5),
        Case(tokens=6, experts=6, popular=True),
        Case(tokens=6, experts=5, lost=True),
    )
    for case in cases:
        assert set(pools[size].run(exchanged_experts, case)) == {"3 / 2"}


def test_the_solver_counts_the_same() -> None:
    rows = TensorMeta(shape=(3, 4), dtype="bfloat16")
    slots = TensorMeta(shape=(3, 2), dtype="int64")
    weights = TensorMeta(shape=(3, 6, 4), dtype="bfloat16"), TensorMeta(shape=(3, 4, 3), dtype="bfloat16")
    node = OpNode(
        name="n", op="autoplan.experts.default", args=(*map(Ref, "abcde"), "silu", 6),
        outputs=(TensorMeta(shape=(6, 4), dtype="bfloat16"),),
    )  # fmt: skip
    group = Group(size=2, per_node=2)
    exchange = Strategy(inputs=(Shard(0),) * 5, outputs=(Shard(0),), local="experts_exchange")
    forward, backward = internal_collectives(node, exchange, (rows, slots, slots, *weights), group)
    assert [c.num_bytes for c in forward] == [6 * 8, 3 * 2 * 4 * 2, 3 * 2 * 4 * 2]
    assert [c.num_bytes for c in backward] == [3 * 2 * 4 * 2, 3 * 2 * 4 * 2]
    whole = Strategy(inputs=(REPLICATE,) * 5, outputs=(REPLICATE,))
    assert internal_collectives(node, whole, (rows, slots, slots, *weights), group) == ((), ())
