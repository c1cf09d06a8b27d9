"""Keywords of a search as a Request and as the flags that a plan keeps."""

import pytest

from autoplan.choices import Choices, choices_of, flags_of, request_of
from autoplan.errors import InputError
from autoplan.plan.plan import Origin, Precision
from autoplan.solver.request import Request

BASE = Request(model="m", dtype="bfloat16", origin=Origin(model="m.py", cluster="8xH100"))


def test_nothing_chosen_is_the_base():
    assert request_of(BASE, Choices()) == BASE
    assert request_of(BASE, Choices(pp=None, gap=None, pins=(), offload=False)) == BASE


def test_every_keyword_reaches_the_request():
    """A keyword that is forgotten on the way leaves the request as it was."""
    values = dict(
        optimizer="sgd", grad_dtype="fp32", reduce_dtype="fp32", state_dtype="fp32", master_dtype="fp32",
        pp=2, dp=2, cp=2, tp=2, ep=2, microbatch=2, recompute="full", schedule="interleaved", chunks=2, data="zero1",
        shards=2, cuts=[1, 2], offload=True, pins=["a=tp:Shard(0)"], forbid=["tp=4"], keep=["head"], runnable=True,
        gap=0.1, top=3, time_limit_s=1.0,
    )  # fmt: skip
    assert set(values) == set(Choices.__annotations__)
    for name, value in values.items():
        assert request_of(BASE, {name: value}) != BASE, name
    request = request_of(BASE, values)
    assert request.precision == Precision(gradients="float32", reductions="float32", states="float32", master="float32")
    assert (request.cuts, request.pins, request.forbid, request.keep) == (
        (1, 2), ("a=tp:Shard(0)",), ("tp=4",), ("head",),
    )  # fmt: skip
    assert (request.gap, request.top, request.time_limit_s, request.model) == (0.1, 3, 1.0, "m")


def test_what_shaped_the_space_is_kept_as_flags():
    choices = Choices(top=5, time_limit_s=3.0, gap=0.1, tp=2, pins=["a=tp:Shard(0)", "b=tp:Shard(1)"], cuts=(4, 8),
                      offload=True, runnable=False, grad_dtype="fp32")  # fmt: skip
    expected = (
        ("grad-dtype", "fp32"), ("tp", "2"), ("cuts", "4,8"), ("offload", "true"), ("pin", "a=tp:Shard(0)"),
        ("pin", "b=tp:Shard(1)"),
    )  # fmt: skip
    assert flags_of(choices) == expected
    assert request_of(BASE, choices).origin == Origin(model="m.py", cluster="8xH100", options=expected)


def test_flags_that_a_plan_keeps_give_the_same_request_again():
    choices = Choices(
        optimizer="sgd", state_dtype="bf16", pp=2, tp=10, microbatch=2, recompute="full", schedule="zbv", data="zero1",
        cuts=(4, 8), offload=True, pins=["a=tp:Shard(0)", "b=tp:Shard(1)"], forbid=["tp=4"], keep=["head"],
        runnable=True,
    )  # fmt: skip
    assert request_of(BASE, choices_of(flags_of(choices))) == request_of(BASE, choices)
    assert choices_of(()) == {}
    with pytest.raises(InputError, match="searched with --warp"):
        choices_of((("warp", "9"),))


def test_flags_do_not_depend_on_the_order_of_the_keywords():
    assert flags_of(Choices(pp=2, tp=4)) == flags_of(Choices(tp=4, pp=2))


def test_an_unknown_keyword_is_a_type_error_that_names_it():
    with pytest.raises(TypeError, match="no keyword 'pipeline'"):
        request_of(BASE, {"pipeline": 2})


@pytest.mark.parametrize("name", ["cuts", "pins", "forbid", "keep"])
def test_a_text_is_no_list(name):
    with pytest.raises(InputError, match=f"{name} is a list, found 'ab'"):
        request_of(BASE, {name: "ab"})


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"grad_dtype": "int8"}, "dtype must be one of bf16"),
        ({"pp": 0}, "pp must be at least 1"),
        ({"schedule": "gpipe"}, "schedule 'gpipe' is not known"),
        ({"gap": 1.0}, "gap is a share"),
    ],
)
def test_bad_values_are_refused(choices, message):
    with pytest.raises(InputError, match=message):
        request_of(BASE, choices)
