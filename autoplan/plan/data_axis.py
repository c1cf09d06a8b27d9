"""Which dim of a parameter the data axis splits in mode "shard".

FSDP2 splits dim 0 with any size, other dims only evenly. A dim that tp splits is left alone: the two splits together
would be a strided shard, which checkpoints cannot hold. A parameter without a free dim (a bias that tp splits) stays
whole on each data rank and has its gradient all-reduced instead.
"""

from autoplan.sharding import REPLICATE, Placement, Shard, can_split


def data_placement(shape: tuple[int, ...], tensor: Placement, dp: int) -> Placement:
    """Placement on the data axis of a parameter with this global shape and placement on the tensor axis."""
    taken = tensor.dim if isinstance(tensor, Shard) else None
    for dim, size in enumerate(shape):
        if dim != taken and dp > 1 and (size % dp == 0 if dim else can_split(size, dp)):
            return Shard(dim)
    return REPLICATE
