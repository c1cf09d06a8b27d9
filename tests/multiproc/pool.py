"""A pool of gloo ranks that stays alive across tests: starting processes costs more than most tests."""

import multiprocessing as mp
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection

START_SECONDS = 120.0


class RankFailure(AssertionError):
    """A job raised on some rank; the message holds every rank's traceback."""


class RankPool:
    """``size`` processes; ``run`` calls a module-level function on all of them, in a fresh process group each time."""

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
            pipe.send((self._jobs, job, args))
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
    while True:
        try:
            number, job, args = pipe.recv()
        except EOFError:
            return
        store = dist.FileStore(f"{folder}/{number}", size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        try:
            pipe.send((True, job(*args)))
        except BaseException:
            pipe.send((False, f"rank {rank}:\n{traceback.format_exc()}"))
        finally:
            dist.destroy_process_group()
