"""Activation recomputation of one segment.

none keeps everything, gather all but the results of all-gathers, selective those of matmuls, attention and collectives,
full nothing.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from autoplan.plan.plan import Recompute
from autoplan.runtime.compat import COLLECTIVE_NAMESPACE, OpOverload
from autoplan.runtime.regather import gather_again

Outputs = tuple[Tensor, ...]

_KEPT = frozenset({
    "aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "autoplan.experts_forward",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu", "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention", "aten._scaled_dot_product_fused_attention_overrideable",
})  # fmt: skip


def run_segment(function: Callable[..., Outputs], recompute: Recompute, *args: object) -> Outputs:
    """Call a local module, keeping for the backward pass what ``recompute`` says.

    Early stop is off, so that the recomputation issues the collectives that the plan counts, no more and no fewer.
    """
    if recompute == "none" or not torch.is_grad_enabled():
        return function(*args)
    if recompute == "gather":
        with gather_again():
            return function(*args)
    with set_checkpoint_early_stop(False):
        if recompute == "full":
            return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]
        return checkpoint(  # type: ignore[no-any-return]
            function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=_selective_contexts
        )


def _selective_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call,no-any-return]


def _policy(_context: object, op: OpOverload, *_args: object, **_kwargs: object) -> CheckpointPolicy:
    if op.namespace == COLLECTIVE_NAMESPACE or str(op.overloadpacket) in _KEPT:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
