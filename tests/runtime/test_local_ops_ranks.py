"""The loss over a split vocabulary, on real ranks. The other local forms are proved in tests/solver/test_rules.py."""

from itertools import product

import collective_jobs as jobs
import pytest

pytestmark = pytest.mark.multiproc


@pytest.mark.parametrize(("size", "vocabulary"), [(2, 7), (3, 8)])
def test_a_split_vocabulary_gives_the_whole_loss(pools, size: int, vocabulary: int) -> None:
    ignored = ("none", "some", "first half", "all")
    pools[size].run(
        jobs.all_losses, [(*c, vocabulary) for c in product((0, 1, 2), ignored, (False, True), (False, True))]
    )


def test_half_precision_and_two_collectives(pools) -> None:
    assert set(pools[2].run(jobs.loss_in_bfloat16_and_collectives)) == {"all_reduce*2 / "}


def test_a_label_outside_the_vocabulary_gives_nan(pools) -> None:
    assert all(pools[2].run(jobs.unknown_label))
