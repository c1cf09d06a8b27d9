"""What a run issues is what its plan says: collectives by axis and kind, on every rank."""

import pytest
import zoo
from multiproc import counting_jobs
from multiproc.test_oracle import BATCH, DEGREES, ILLEGAL, searched

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(600)]


@pytest.mark.parametrize("degrees", DEGREES, ids=lambda d: "pp{}-dp{}-tp{}".format(*d))
@pytest.mark.parametrize("name", list(zoo.ZOO))
def test_issued_equals_planned(pools, name: str, degrees: tuple[int, int, int]) -> None:
    if (name, degrees[2]) in ILLEGAL:
        pytest.skip("refused by the search")
    plan = searched(name, *degrees)
    for stage, issued in pools[plan.mesh.num_devices].run(counting_jobs.count, name, plan, BATCH):
        planned = {(c.axis, c.kind.value): c.count for c in plan.stages[stage].collectives}
        assert issued == planned, f"stage {stage}"
