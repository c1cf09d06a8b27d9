"""A pool of gloo ranks that stays alive across tests: starting processes costs more than most tests."""

import multiprocessing as mp
import os
import tempfile
import traceback
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection

START_SECONDS = 120.0


class RankFailure(AssertionError):
    """A job raised on some rank; the message holds every rank's traceback."""


class RankPool:
    """``size`` processes; ``run`` calls a module-level function on all of them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._jobs = 0
        self._start()

    def _start(self) -> None:
        context = mp.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, self.size, self._folder.name), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, job: Callable[..., object], *args: object, timeout: float = 120.0) -> list[object]:
        """Results by rank. Raises RankFailure; a rank that does not answer in time costs the pool, which restarts."""
        self._jobs += 1
        for pipe in self._pipes:
            pipe.send((job, args))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            # Once a rank has failed the others may wait for it for ever.
            patience = 5.0 if any(not ok for ok, _ in answers) else timeout + (START_SECONDS if self._jobs == 1 else 0)
            try:
                answers.append(pipe.recv() if pipe.poll(patience) else (False, f"rank {rank}: no answer"))
            except (EOFError, ConnectionError):
                answers.append((False, f"rank {rank} died"))
        if all(ok for ok, _ in answers):
            return [result for _, result in answers]
        self.close()
        self._start()
        self._jobs = 0
        raise RankFailure("\n".join(str(result) for ok, result in answers if not ok))

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
    _keep_groups()
    while True:
        try:
            job, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, job(*args)))
        except BaseException:
            pipe.send((False, f"rank {rank}:\n{traceback.format_exc()}"))


def _keep_groups() -> None:
    """Make each mesh and group once per process: torch never frees one that a DTensor has seen, and each one polls."""
    import torch.distributed as dist

    from autoplan.runtime import mesh

    mesh.init_device_mesh = cache(mesh.init_device_mesh)  # type: ignore[attr-defined]
    original, made = dist.new_group, {}

    def new_group(ranks: list[int] | None = None, *args: object, **kwargs: object) -> object:
        if ranks is None or args or kwargs:
            return original(ranks, *args, **kwargs)
        if tuple(ranks) not in made:
            made[tuple(ranks)] = original(ranks)
        return made[tuple(ranks)]

    dist.new_group = new_group
