"""What parameters cost beside their collectives: gradients that add up, the optimizer; what compute loses to both."""

from autoplan.cost import Work
from autoplan.ir import DTYPE_BYTES
from autoplan.plan.memory import ParamBytes
from autoplan.solver.setting import Setting


def updated_bytes(setting: Setting, params: ParamBytes) -> int:
    """Bytes of the trainable parameters that one rank updates."""
    return params.trainable if setting.point.data == "replicate" else params.kept_trainable


def exposed_us(setting: Setting, comm_us: float, compute_us: float) -> float:
    """What communication beside compute adds to it: all that outlasts it, and what the hidden part takes from it."""
    hidden = min(comm_us, compute_us)
    return comm_us - hidden + setting.cost.overlap_loss() * hidden


def accumulate_us(setting: Setting, params: ParamBytes) -> float:
    """Time of ``accumulate_work``, one microbatch."""
    work = accumulate_work(setting, params)
    return 0.0 if work is None else setting.cost.compute_us(work)


def accumulate_work(setting: Setting, params: ParamBytes) -> Work | None:
    """Per microbatch: read the new gradient and the sum so far, write the sum; None where nothing adds up."""
    if setting.point.num_microbatches == 1 or params.trainable == 0:
        return None
    dtype = next(iter(setting.sg.graph.params)).meta.dtype
    gradients = setting.data_axis.gradient_bytes(params.trainable)
    flops = params.trainable // DTYPE_BYTES[dtype]
    return Work(kind="memory", flops=flops, num_bytes=params.trainable + 2 * gradients, dtype=dtype)


def optimizer_us(setting: Setting, params: ParamBytes) -> float:
    """Update of the trainable parameters: read gradient, parameter and states, write parameter and states.

    With states in host memory the gradient goes there and the parameter comes back over the device's host link, and
    the update itself, on the host, is charged at the speed of that link.
    """
    updated = updated_bytes(setting, params)
    if updated == 0:
        return 0.0
    traffic = -(-updated * setting.state_traffic[0] // setting.state_traffic[1])
    if setting.point.offload:
        return setting.cost.host_copy_us(2 * updated + traffic)
    dtype = next(iter(setting.sg.graph.params)).meta.dtype
    flops = 4 * updated // DTYPE_BYTES[dtype]
    return setting.cost.compute_us(Work(kind="memory", flops=flops, num_bytes=traffic, dtype=dtype))
