"""Every change of placement on real ranks: values, gradients, and exactly the collectives that are priced."""

from itertools import product

import collective_jobs as jobs
import pytest
import torch

from autoplan.runtime.collectives import AxisGroup, moves, redistribute
from autoplan.sharding import (
    PARTIAL,
    REPLICATE,
    REPLICATE_PARTIAL_GRAD,
    CollectiveKind,
    Shard,
    parse_placement,
    redistribution,
)

PLACEMENTS = (Shard(0), Shard(1), Shard(1, 3), REPLICATE, REPLICATE_PARTIAL_GRAD, PARTIAL)
PAIRS = [(src, dst) for src, dst in product(PLACEMENTS, PLACEMENTS) if src != dst]
ISSUED = {
    CollectiveKind.ALL_REDUCE: "all_reduce*1",
    CollectiveKind.ALL_GATHER: "all_gather_into_tensor*1",
    CollectiveKind.REDUCE_SCATTER: "reduce_scatter_tensor*1",
    CollectiveKind.ALL_TO_ALL: "all_to_all_single*1",
    None: "",
}


def as_text(shape: tuple[int, ...]) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(str(src), str(dst), shape) for src, dst in PAIRS]


def test_moves_take_the_collectives_that_are_priced() -> None:
    for src, dst in PAIRS:
        forward, backward = moves(src, dst)
        assert (forward.collective, backward.collective) == redistribution(src, dst)


@pytest.mark.multiproc
@pytest.mark.parametrize(("size", "shape"), [(2, (5, 12, 2)), (3, (7, 9))])
def test_values_and_gradients_survive(pools, size: int, shape: tuple[int, ...]) -> None:
    pairs = as_text(shape)
    for found in pools[size].run(jobs.all_changes, pairs, False):
        for (src, dst, _), collectives in zip(pairs, found, strict=True):
            priced = redistribution(parse_placement(src), parse_placement(dst))
            assert collectives == [ISSUED[kind] for kind in priced], f"{src} -> {dst}"


@pytest.mark.multiproc
def test_changes_compile_without_a_break(pools) -> None:
    few = [("Shard(0)", "Replicate(partial_grad)"), ("Partial", "Shard(1)"), ("Shard(1, blocks=3)", "Shard(0)")]
    few += [("Replicate", "Shard(0)"), ("Replicate", "Replicate(partial_grad)")]
    pools[2].run(jobs.all_changes, [(src, dst, (5, 12)) for src, dst in few], True)


@pytest.mark.multiproc
def test_integers_and_booleans_move(pools) -> None:
    pools[2].run(jobs.integers_move)


def test_local_changes_need_no_group() -> None:
    axis = AxisGroup(group=None, size=2, coordinate=1)
    x = torch.arange(8.0).reshape(4, 2).requires_grad_()
    part = redistribute(x, REPLICATE_PARTIAL_GRAD, Shard(0), axis, (4, 2))
    assert part.tolist() == [[4.0, 5.0], [6.0, 7.0]]
    part.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]]
    with pytest.raises(AssertionError, match="without a process group"):
        redistribute(x, PARTIAL, REPLICATE, axis, (4, 2))


def test_an_axis_of_one_changes_nothing() -> None:
    x = torch.ones(3)
    assert redistribute(x, PARTIAL, Shard(0), AxisGroup(group=None, size=1, coordinate=0), (3,)) is x
