"""What each of a pool of gloo ranks does: it compiles models by plans, runs their steps and tells what they took."""

import importlib.util
import os
import sys
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from multiproc.pool import RankPool  # noqa: E402  the tests' pool: it survives a rank that dies

__all__ = ["ANSWER_S", "RankPool", "Step", "peak_bytes", "start", "steps", "stop"]

ANSWER_S = 300.0
"""What one call may take on a machine with other work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A model that runs by a plan on this rank."""

    model: object
    optimizer: object
    batch: dict[str, object]

    def step(self) -> None:
        loss = self.model(**self.batch)[1]
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


_running: dict[str, Running] = {}


def start(name: str, file: str, plan: str, batch_size: int) -> None:
    """Compile the model of ``file`` by the plan file, with the optimizer that plans count on (AdamW, one kernel)."""
    import torch

    import autoplan

    module = load(file)
    torch.manual_seed(0)
    model = autoplan.compile(module.build_model(), plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    _running[name] = Running(model=model, optimizer=optimizer, batch=module.example_inputs(batch_size))


@cache
def load(file: str) -> object:
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of one rank, in seconds: by the clock, on processors by this rank, and by all that the machine ran."""

    wall: float
    own: float
    busy: float


def steps(name: str, count: int) -> list[Step]:
    """So many steps, each after all ranks are ready; one step before them is not measured."""
    import torch.distributed as dist

    _running[name].step()
    taken = []
    for _ in range(count):
        dist.barrier()
        busy, own, started = _busy_s(), time.process_time(), time.perf_counter()
        _running[name].step()
        wall = time.perf_counter() - started
        taken.append(Step(wall=wall, own=time.process_time() - own, busy=_busy_s() - busy))
    return taken


def _busy_s() -> float:
    """Processor seconds since the start of the machine that were not idle."""
    fields = Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]
    return (sum(map(int, fields)) - int(fields[3]) - int(fields[4])) / os.sysconf("SC_CLK_TCK")


def peak_bytes(name: str) -> int:
    """Most bytes of tensors alive in a step: local parameters and optimizer states, and what the allocator hands out.

    What a step allocates and frees is as the profiler of torch saw it at the CPU allocator. Inputs, the Python process
    and buffers inside gloo are not in it.
    """
    import torch
    from torch.distributed.tensor import DTensor
    from torch.profiler import ProfilerActivity, profile

    running = _running[name]
    running.step()

    def size(x: object) -> int:
        local = x.to_local() if isinstance(x, DTensor) else x
        return local.nbytes if isinstance(local, torch.Tensor) else 0

    held = sum(map(size, running.model.parameters()))
    held += sum(size(value) for state in running.optimizer.state.values() for value in state.values())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        running.step()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return held + most


def stop(name: str) -> None:
    """Free the model."""
    del _running[name]
