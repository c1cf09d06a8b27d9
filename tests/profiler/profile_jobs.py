"""What the ranks of the profiler's tests do."""

import time
from collections.abc import Callable


def sum_then_fail(told: Callable[[str], None]) -> None:
    """Sum rank + 1 over the ranks and tell it; then the last rank ends, and the others wait for it for ever."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    number = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(number)
    told(str(int(number.item())))
    if dist.get_rank() == 1:
        raise SystemExit(3)
    time.sleep(60)
