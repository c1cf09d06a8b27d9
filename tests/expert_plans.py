"""Plans that experts published (``data/expert_plans.toml``), as searches with pins."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from autoplan.cost_models import ProfileCostModel, load_cluster
from autoplan.plan.plan import Precision

DATA = Path(__file__).parent / "data"
MODELS = Path(__file__).parents[1] / "benchmarks" / "models"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlan:
    """One published run. ``pins`` are fields of ``solver.request.Request``."""

    name: str
    source: str
    model: str
    """As ``autoplan search`` takes it."""
    cluster: str
    global_batch: int
    seq_len: int
    precision: Precision
    pins: tuple[tuple[str, int | str], ...]
    assumed: str
    """Where the source was read freely, and why."""
    fits: bool
    """Whether the plan fits the memory by our model."""
    why: str
    """What it needs too much of, where it does not fit."""

    @property
    def job(self) -> tuple[object, ...]:
        """What is trained on what: everything but how."""
        return self.model, self.cluster, self.global_batch, self.seq_len, self.precision


def expert_plans() -> tuple[ExpertPlan, ...]:
    """All of them, in the order of the file."""
    document = tomllib.loads((DATA / "expert_plans.toml").read_text(encoding="utf-8"))
    return tuple(
        ExpertPlan(
            name=row["name"],
            source=document["sources"][row["source"]],
            model=str(MODELS / row["model"]),
            cluster=row["cluster"],
            global_batch=row["global_batch"],
            seq_len=row["seq_len"],
            precision=Precision(**document["precisions"][row["precision"]]),
            pins=tuple(row["pins"].items()),
            assumed=row["assumed"],
            fits=row.get("fits", True),
            why=row.get("why", ""),
        )
        for row in document["plan"]
    )


def cost_model(spec: str, folder: Path) -> ProfileCostModel:
    """The cluster of an expert plan; ``16x8xNAME.toml`` is 16 nodes of 8 as in that file, and written to ``folder``."""
    if spec.endswith(".toml"):
        nodes, devices, file = spec.split("x", 2)
        path = folder / f"{nodes}x{devices}-{file}"
        path.write_text(f"nodes = {nodes}\ndevices_per_node = {devices}\n{(DATA / file).read_text(encoding='utf-8')}")
        spec = str(path)
    cluster, profile = load_cluster(spec)
    return ProfileCostModel(cluster=cluster, profile=profile)
