"""The plans of the examples, as text. A change that is not meant to change plans must leave them as they are.

``pytest tests/test_golden_plans.py --update-golden`` writes them anew; the diff belongs in the review.
"""

import re
from pathlib import Path

import pytest

from autoplan.planning import search_source

GOLDEN = Path(__file__).parent / "golden"
EXAMPLES = Path(__file__).parent.parent / "examples"
CASES = [
    ("nanogpt", "8xH100", {"global_batch": 512}),
    ("nanogpt", "4xcpu", {"global_batch": 16, "pp": 2, "tp": 2}),
    ("llama", "2x8xA100-80GB", {"global_batch": 256, "tp": 2}),
]


@pytest.mark.parametrize(("model", "cluster", "options"), CASES, ids=str)
def test_plan_is_as_recorded(request: pytest.FixtureRequest, model: str, cluster: str, options) -> None:
    plan = search_source(str(EXAMPLES / f"{model}.py"), cluster=cluster, **options)
    # Memory of a CPU device is that of the machine at hand.
    text = "\n".join(line for line in str(plan).splitlines() if not re.match(r" +(limit|free|device) ", line))
    text = re.sub(r" +\S+%$", "", text, flags=re.MULTILINE) if "cpu" in cluster else text
    pins = "".join(f"-{key}{value}" for key, value in options.items())
    path = GOLDEN / f"{model}-{cluster}{pins}.txt"
    if request.config.getoption("--update-golden"):
        path.write_text(text + "\n")
    assert text + "\n" == path.read_text(), f"{path.name} differs: if that is meant, run with --update-golden"
