"""Random small jobs: model, cluster, cost model, request; about a fifth fit nowhere."""

import random
from dataclasses import dataclass, replace

from small_models import MODELS, small_model
from toy_cost import ToyCost

from autoplan.cluster import Cluster
from autoplan.plan.plan import DATA_MODES, RECOMPUTE, SCHEDULES, Precision
from autoplan.solver.points import Space
from autoplan.solver.request import Request
from autoplan.solver.solve import prepare
from autoplan.solver.tables import Tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a search is asked."""

    model: str
    cluster: Cluster
    cost: ToyCost
    request: Request

    def prepared(self) -> tuple[Tables, Space]:
        return prepare(small_model(self.model), self.cluster, self.cost, self.request)


def random_job(seed: int) -> Job:
    rng = random.Random(seed)
    model = rng.choice([*MODELS])
    nodes, per_node = rng.choice([(1, 1), (1, 2), (1, 2), (2, 1), (1, 4), (1, 4), (2, 2), (1, 8), (2, 4)])
    cost = ToyCost(
        flops_per_us=10 ** rng.uniform(4, 6),
        bytes_per_us=10 ** rng.uniform(3, 5),
        link_bytes_per_us=10 ** rng.uniform(2, 5),
        host_bytes_per_us=10 ** rng.uniform(1, 3),
        latency_us=rng.choice([0.0, 1.0, 10.0]),
    )
    request = _request(rng, model, nodes * per_node)
    whole = sum(param.meta.num_bytes for param in small_model(model).graph.params)
    memory = int(whole * 10 ** rng.uniform(-0.2, 1.2))
    where = Cluster(num_nodes=nodes, devices_per_node=per_node, device="toy", memory_bytes=memory)
    return Job(model=model, cluster=where, cost=cost, request=request)


def _request(rng: random.Random, model: str, devices: int) -> Request:
    precision = Precision()
    if rng.random() < 0.3:
        precision = Precision(gradients="float32", states=rng.choice(["float32", "bfloat16"]), master="float32")
    request = Request(
        model=model, dtype="float32", gap=0.0, optimizer=rng.choice(["adamw", "sgd"]), precision=precision,
        offload=rng.random() < 0.2,
    )  # fmt: skip
    pins = {
        "recompute": rng.choice(RECOMPUTE), "microbatch": rng.choice([1, 2]), "data": rng.choice(DATA_MODES),
        "schedule": rng.choice(SCHEDULES), "tp": rng.choice([1, 2]), "pp": rng.choice([1, 2, 4]),
        "dp": rng.choice([1, 2]),
    }  # fmt: skip
    likely = 0.25 if devices <= 2 else 0.4
    for name in sorted(pins):
        if rng.random() < likely:
            request = replace(request, **{name: pins[name]})
    if request.pp and request.pp > 1 and rng.random() < 0.3:
        last = len(small_model(model).segments) - 1
        request = replace(request, cuts=tuple(sorted(rng.sample(range(1, last + 1), min(last, request.pp - 1)))))
    if devices > 1 and rng.random() < 0.15:
        request = replace(request, cp=2)  # not tried on short sequences unless it is pinned
    if rng.random() < 0.1:
        request = replace(request, forbid=(rng.choice(["recompute=full", "data=shard", "schedule=zbv", "dp=1"]),))
    return request
