"""What the ranks of the profiler's tests do."""

from collections.abc import Callable
from pathlib import Path


def note_sum(folder: str, told: Callable[[str], None]) -> None:
    """Sum rank + 1 over the ranks and tell it; the last rank fails where there is no folder."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    number = torch.tensor([dist.get_rank() + 1])
    if dist.get_rank() == 1 and not Path(folder).is_dir():
        raise SystemExit(3)
    dist.all_reduce(number)
    told(str(int(number.item())))
    dist.destroy_process_group()
