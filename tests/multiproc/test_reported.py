"""Cases that once went wrong on several ranks stay right."""

import math

import pytest
from multiproc import reported_jobs

pytestmark = pytest.mark.multiproc


@pytest.mark.parametrize("learn", [True, False])
def test_a_tied_parameter_with_a_gradient_on_some_stages_only(pools, learn: bool) -> None:
    assert pools[2].run(reported_jobs.tied_with_one_gradient, learn) == [[], []]


def test_norms_of_a_part_and_of_nan(pools) -> None:
    for found in pools[2].run(reported_jobs.norms):
        assert found["part"] == pytest.approx(found["plain"], abs=1e-12)
        assert math.isnan(found["largest"]) and math.isnan(found["two"])
