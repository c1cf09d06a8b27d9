"""The ops of a model at the shapes that its ranks may see: those that a search asks prices for."""

from dataclasses import dataclass, field

from autoplan.cluster import Cluster
from autoplan.cost import Collective, CostModel, Work
from autoplan.cost_models import ProfileCostModel
from autoplan.errors import InfeasibleError
from autoplan.planning import Told, load_job
from autoplan.profiler.cases import OpCase
from autoplan.solver.solve import solve

_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorder:
    """A cost model that remembers the calls it is asked about."""

    inner: CostModel
    cases: dict[str, OpCase] = field(default_factory=dict)

    def compute_us(self, work: Work) -> float:
        """As the inner one."""
        if work.call is not None:
            case = OpCase(call=work.call, flops=work.flops, num_bytes=work.num_bytes)
            self.cases.setdefault(case.key, case)
        return self.inner.compute_us(work)

    def collective_us(self, collective: Collective) -> float:
        """As the inner one."""
        return self.inner.collective_us(collective)

    def overlap_loss(self) -> float:
        """As the inner one."""
        return self.inner.overlap_loss()

    def host_copy_us(self, num_bytes: int) -> float:
        """As the inner one."""
        return self.inner.host_copy_us(num_bytes)

    def peak_flops_per_s(self, dtype: str) -> float:
        """As the inner one."""
        return self.inner.peak_flops_per_s(dtype)


def model_cases(
    spec: str,
    cluster: Cluster,
    cost: ProfileCostModel,
    *,
    global_batch: int | None,
    seq_len: int | None,
    told: Told,
) -> tuple[OpCase, ...]:
    """Every op, local shape and direction of the plans that may run on the cluster, in order of their text."""
    job = load_job(spec, (cluster,), global_batch, seq_len, None, {"runnable": True, "time_limit_s": _SECONDS}, told)
    recorder = Recorder(inner=cost)
    try:
        solve(job.segmented, cluster, recorder, job.request, profile_digest="", progress=told)
    except InfeasibleError:
        told("no plan of the model fits: only the ops that were priced are measured")
    return tuple(recorder.cases[key] for key in sorted(recorder.cases))
