"""A pool of gloo ranks, one thread each, that stays alive: it compiles models by plans and runs their steps."""

import importlib.util
import multiprocessing as mp
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path

ANSWER_S = 300.0


class RankPool:
    """``size`` processes; ``run`` calls a function of this module on all of them."""

    def __init__(self, size: int) -> None:
        context = mp.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._pipes, self._processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, size, self._folder.name), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, job: Callable[..., object], *args: object) -> list[object]:
        """Results by rank. Raises RuntimeError with what went wrong on a rank."""
        for pipe in self._pipes:
            pipe.send((job, args))
        answers = [pipe.recv() if pipe.poll(ANSWER_S) else (False, "no answer") for pipe in self._pipes]
        failed = [str(result) for fine, result in answers if not fine]
        if failed:
            raise RuntimeError("\n".join(failed))
        return [result for _, result in answers]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def _serve(pipe: Connection, rank: int, size: int, folder: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    _make_groups_once()
    while True:
        try:
            job, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, job(*args)))
        except BaseException:
            pipe.send((False, f"rank {rank}:\n{traceback.format_exc()}"))


def _make_groups_once() -> None:
    """Torch never frees a group that a DTensor has seen, and each one polls: plans of one mesh share theirs."""
    import torch.distributed as dist

    from autoplan.runtime import mesh

    mesh.init_device_mesh = cache(mesh.init_device_mesh)
    original, made = dist.new_group, {}

    def new_group(ranks: list[int] | None = None, *args: object, **kwargs: object) -> object:
        if ranks is None or args or kwargs:
            return original(ranks, *args, **kwargs)
        if tuple(ranks) not in made:
            made[tuple(ranks)] = original(ranks)
        return made[tuple(ranks)]

    dist.new_group = new_group


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
