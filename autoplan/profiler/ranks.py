"""N ranks of gloo on this machine's CPU, each a process with one thread, started for one measurement."""

import multiprocessing as mp
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection

from autoplan.errors import AutoplanError

Told = Callable[[str], None]
Job = Callable[..., None]
"""A function of a module: called on every rank, as torchrun would have started it, with ``told`` as its last argument.
"""


def run_ranks(ranks: int, job: Job, *args: object, told: Told) -> None:
    """Call ``job(*args, told)`` on so many new processes and wait. None is left behind, whatever happens.

    What rank 0 tells is told here. Raises AutoplanError when a rank fails, KeyboardInterrupt when one was interrupted.
    """
    context = mp.get_context("spawn")
    port = free_port()
    ours, theirs = context.Pipe(duplex=False)
    started = [
        context.Process(target=_rank, args=(rank, ranks, port, job, args, theirs), daemon=True) for rank in range(ranks)
    ]
    try:
        for process in started:
            process.start()
        _wait(started, ours, told)
    finally:
        for process in started:
            if process.pid is not None:
                process.kill()
                process.join()


def _wait(started: list[mp.context.SpawnProcess], messages: Connection, told: Told) -> None:
    while not _all_ended(started):
        while messages.poll(0.05):
            told(messages.recv())
        failed = [rank for rank, process in enumerate(started) if process.exitcode not in (None, 0)]
        if failed:
            raise AutoplanError(f"rank {failed[0]} of the measurement ended early: its error is above")


def _all_ended(started: list[mp.context.SpawnProcess]) -> bool:
    return all(process.exitcode is not None for process in started)


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _rank(rank: int, ranks: int, port: int, job: Job, args: tuple[object, ...], messages: Connection) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    import torch  # with the variables above

    torch.set_num_threads(1)
    with suppress(KeyboardInterrupt):  # the parent tells the user
        job(*args, messages.send if rank == 0 else _silent)


def _silent(_message: str) -> None:
    pass
