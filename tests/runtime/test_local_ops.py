"""Local forms on both axes at once, and how arguments are resolved. Single axes are proved in the rules' test."""

import pytest
import torch
from torch import Tensor

from autoplan.ir import OpNode, Ref, TensorMeta, Token
from autoplan.runtime.local_ops import (
    LocalAxis,
    LocalUse,
    denominator_operands,
    local_call,
    loss_denominator,
    plain_call,
    to_torch_token,
)

CPU = torch.device("cpu")


def node(op: str, *args: object, shape: tuple[int, ...] = (), dtype: str = "float64") -> OpNode:
    outputs = (TensorMeta(shape=shape, dtype=dtype),)
    return OpNode(name="n", op=f"aten.{op}", args=args, outputs=outputs)  # type: ignore[arg-type]


def on_both(used: OpNode, form: str, shapes: tuple[tuple[int, ...], ...], batch: int, tensor: int) -> LocalUse:
    return LocalUse(
        node=used,
        shapes=shapes,
        batch=LocalAxis(size=2, coordinate=batch, group=None, form=form),
        tensor=LocalAxis(size=2, coordinate=tensor, group=None, form=form),
        device=CPU,
    )


def test_a_mean_weighs_both_axes() -> None:
    x = torch.randn(4, 5, dtype=torch.float64)
    used = node("mean.default", Ref("x"))
    total = torch.zeros((), dtype=torch.float64)
    for batch in (0, 1):
        for tensor in (0, 1):
            part = x.chunk(2, 0)[batch].chunk(2, 1)[tensor]
            total += local_call(on_both(used, "mean", ((4, 5),), batch, tensor), (part,))
    torch.testing.assert_close(total, x.mean())


def test_a_range_is_cut_twice() -> None:
    used = node("arange.start_step", 3, 23, 2, shape=(10,), dtype="int64")
    found = [local_call(on_both(used, "arange", (), b, t), ()) for b in (0, 1) for t in (0, 1)]
    assert torch.cat(found).tolist() == list(range(3, 23, 2))
    assert [len(part) for part in found] == [3, 2, 3, 2]


def test_tokens_are_cut_twice_and_share_one_count() -> None:
    logits, target = torch.randn(8, 5, dtype=torch.float64), torch.tensor([1, -1, -1, 2, -1, -1, -1, 3])
    used = node("cross_entropy_loss.default", Ref("x"), Ref("t"), None, 1, -1)
    count = loss_denominator(used, target)
    total = torch.zeros((), dtype=torch.float64)
    for batch in (0, 1):
        for tensor in (0, 1):
            rows: list[Tensor] = [x.chunk(2)[batch].chunk(2)[tensor] for x in (logits, target)]
            use = on_both(used, "cross_entropy_tokens", ((8, 5), (8,)), batch, tensor)
            total += local_call(use, (rows[0], rows[1]), count)
    torch.testing.assert_close(total, torch.nn.functional.cross_entropy(logits, target, ignore_index=-1))


def test_no_valid_label_gives_nan_as_torch_does() -> None:
    used = node("cross_entropy_loss.default", Ref("x"), Ref("t"), None, 1, -1)
    target = torch.full((4,), -1)
    use = on_both(used, "cross_entropy_tokens", ((4, 5), (4,)), 0, 0)
    assert local_call(use, (torch.randn(1, 5), target[:1]), loss_denominator(used, target)).isnan()


def test_class_weights_must_be_handed_over() -> None:
    used = node("cross_entropy_loss.default", Ref("x"), Ref("t"), Ref("w"))
    assert denominator_operands(used) == ("t", "w")
    target, weight = torch.tensor([0, 2, -100]), torch.tensor([0.5, 1.0, 2.0])
    assert loss_denominator(used, target, weight).item() == 2.5
    with pytest.raises(AssertionError, match="class weights do not match"):
        loss_denominator(used, target)


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(AssertionError, match="no local form 'sideways'"):
        local_call(on_both(node("mean.default", Ref("x")), "sideways", ((4,),), 0, 0), (torch.ones(1),))


def test_ops_are_called_with_nested_values_and_tokens() -> None:
    joined = plain_call(node("cat.default", (Ref("a"), Ref("b")), 0), (torch.ones(1), torch.zeros(2)), CPU)
    assert isinstance(joined, Tensor) and joined.tolist() == [1, 0, 0]
    assert to_torch_token(Token("dtype", "float32"), CPU) is torch.float32
    assert to_torch_token(Token("device", "cuda"), CPU) == CPU
