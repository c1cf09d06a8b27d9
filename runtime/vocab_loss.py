"""Cross-entropy of logits that are split over the vocabulary, without gathering them.

loss_i = log(sum_v exp(x_iv)) - x_i,target. Each rank has columns ``start`` to ``start + C`` of x. Forward: one
all-reduce of the largest logit per token (N elements), one of the sums of exponentials beside the target's logits
(2N). Backward is local: softmax minus one at the target, by the gradient of the token's loss.

N: tokens, C: this rank's columns.
"""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.distributed import ProcessGroup

from autoplan.runtime import compat


def vocab_cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    *,
    ignore_index: int,
    start: int,
    vocabulary: int,
    group: ProcessGroup,
) -> Tensor:
    """Loss of each token, the same on every rank; 0 where the target is ignored.

    ``logits`` [N, C] local, ``target`` [N] and ``weight`` [vocabulary] whole. A target outside the vocabulary gives
    nan, as there is no way to raise from a device. Computed in float32 for half precision, as torch does.
    """
    valid = target != ignore_index
    known = torch.where(valid, target, 0)
    inside = (known >= 0) & (known < vocabulary)
    factor = torch.where(valid, torch.where(inside, 1.0, torch.nan), 0.0).to(logits.dtype)
    if weight is not None:
        factor = factor * weight[known.clamp(0, vocabulary - 1)]
    losses: object = _VocabCrossEntropy.apply(logits, known - start, group)  # type: ignore[no-untyped-call]
    assert isinstance(losses, Tensor)
    return torch.where(valid, losses * factor, 0.0)


class _VocabCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, logits: Tensor, column: Tensor, group: ProcessGroup) -> Tensor:
        """``column`` is the target's place among this rank's columns; outside of them on all ranks but one."""
        exact = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        largest = compat.all_reduce(exact.amax(1), "max", group)
        shifted = exact - largest.unsqueeze(1)
        here = (column >= 0) & (column < logits.shape[1])
        own = torch.where(here, column, 0).unsqueeze(1)
        target_logit = torch.where(here, shifted.gather(1, own).squeeze(1), 0.0)
        exponentials = shifted.exp()
        sums = compat.all_reduce(torch.stack([exponentials.sum(1), target_logit]), "sum", group)
        probabilities = (exponentials / sums[0].unsqueeze(1)).to(logits.dtype)
        ctx.save_for_backward(probabilities, own, here)
        loss: Tensor = sums[0].log() - sums[1]
        return loss.to(logits.dtype)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        probabilities, own, here = ctx.saved_tensors  # type: ignore[attr-defined]
        ones = here.unsqueeze(1).to(probabilities.dtype)
        return (probabilities.scatter_add(1, own, -ones)) * grad.unsqueeze(1), None, None
