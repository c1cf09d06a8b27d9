"""The private torch names of the runtime are still there, and look as we call them."""

import torch

from autoplan.runtime import compat


def test_functional_collectives_take_what_we_pass() -> None:
    ops = getattr(torch.ops, compat.COLLECTIVE_NAMESPACE)
    expected = {
        "all_reduce": ["input", "reduce_op", "group_name"],
        "all_gather_into_tensor": ["input", "group_size", "group_name"],
        "reduce_scatter_tensor": ["input", "reduce_op", "group_size", "group_name"],
        "all_to_all_single": ["input", "output_split_sizes", "input_split_sizes", "group_name"],
        "wait_tensor": ["tensor"],
    }
    for name, arguments in expected.items():
        schema = getattr(ops, name).default._schema
        assert [argument.name for argument in schema.arguments] == arguments, name


def test_a_strided_shard_takes_a_split_factor() -> None:
    placement = compat.StridedShard(1, split_factor=3)
    assert (placement.dim, placement.split_factor) == (1, 3)
