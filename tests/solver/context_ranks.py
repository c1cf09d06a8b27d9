"""All ranks of a context axis in one process, in lockstep: a value is a list of parts, one per rank.

A move brings the parts together and hands out others, in the forward pass and, with the layout of the gradients, in
the backward pass. What should be equal on all ranks is checked to be.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from rule_prover import CPU, as_tuple
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from autoplan.ir import OpNode, Segment, SegmentedGraph
from autoplan.localize import localize_node
from autoplan.runtime.layouts import local_part
from autoplan.runtime.local_ops import (
    LocalAxis,
    LocalUse,
    denominator_operands,
    local_call,
    loss_denominator,
    plain_call,
)
from autoplan.sharding import PARTIAL, REPLICATE, REPLICATE_PARTIAL_GRAD, Partial, Placement, Shard, Strategy
from autoplan.solver.choice import Resolved
from autoplan.solver.context import Context
from autoplan.solver.rules_context import CONTEXT_ATTENTION

Parts = tuple[Tensor, ...]
ALONE = LocalAxis(size=1, coordinate=0, group=None, form="")
ANY_STRIDES = {"aten.view.default": "aten.reshape.default", "aten._unsafe_view.default": "aten.reshape.default"}
"""As the runtime does: parts have the strides that a move leaves."""


def of_gradient(place: Placement) -> Placement:
    """How the gradient of a value lies."""
    if isinstance(place, Partial):
        return REPLICATE
    return PARTIAL if place == REPLICATE_PARTIAL_GRAD else place


def join(parts: Parts, place: Placement) -> Tensor:
    """The whole; parts that should be equal are checked."""
    if isinstance(place, Partial):
        return torch.stack(parts).sum(0)
    if isinstance(place, Shard):
        blocks = zip(*(part.chunk(place.blocks, place.dim) for part in parts), strict=True)
        return torch.cat([piece for block in blocks for piece in block], place.dim)
    for part in parts[1:]:
        torch.testing.assert_close(part, parts[0], rtol=1e-9, atol=1e-11)
    return parts[0]


def cut(whole: Tensor, place: Placement, degree: int) -> Parts:
    """The parts of all ranks; the first rank has all of a sum."""
    if isinstance(place, Partial):
        return (whole.clone(), *(torch.zeros_like(whole) for _ in range(degree - 1)))
    return tuple(local_part(whole, place, degree, rank).clone() for rank in range(degree))


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx, src: Placement, dst: Placement, *parts: Tensor) -> Parts:
        ctx.src, ctx.dst = src, dst
        return cut(join(parts, src), dst, len(parts))

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        whole = join(grads, of_gradient(ctx.dst))
        return None, None, *cut(whole, of_gradient(ctx.src), len(grads))


def move(parts: Parts, src: Placement, dst: Placement) -> Parts:
    return parts if src == dst else _Move.apply(src, dst, *parts)


def context_attention(node: OpNode, operands: Parts, positions: Tensor) -> Tensor:
    """The local form of causal attention with split queries: each query sees the keys up to its own position."""
    query, key, value = operands
    mask = positions[:, None] >= torch.arange(key.shape[-2])[None]
    options = {name: arg for name, arg in node.kwargs if name in ("scale", "enable_gqa")}
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """A segmented graph, run by the strategies of a context."""

    sg: SegmentedGraph
    context: Context
    whole: Mapping[str, Tensor]
    """Every value as one device computes it."""

    @property
    def degree(self) -> int:
        return self.context.degree

    def loss(self, params: Mapping[str, Parts]) -> Parts:
        """What each rank has of the loss. ``params`` has a leaf per rank."""
        values = dict(params)
        for segment in self.sg.segments:
            self._run_segment(segment, values)
        loss = self.sg.graph.loss
        assert loss is not None
        return values[loss]

    def _run_segment(self, segment: Segment, values: dict[str, Parts]) -> None:
        first, resolved = self.sg.representative(segment.kind), self.context.resolved[segment.kind]
        own = dict(zip((*first.params, *first.inputs), (*segment.params, *segment.inputs), strict=True))
        here: dict[tuple[str, Placement], Parts] = {}
        for name, mine in own.items():
            parts = values.get(mine) or cut(self.whole[mine], REPLICATE, self.degree)
            here[name, resolved.sources[name]] = parts
        nodes = {node.name: node for node in self.sg.graph.nodes}
        for mine, (problem, candidate) in zip(segment.nodes, resolved.nodes, strict=True):
            operands = [
                self._moved(here, resolved, name, place)
                for name, place in zip(problem.operands, candidate.strategy.inputs, strict=True)
            ]
            results = self._run(nodes[mine], candidate.strategy, operands)
            here |= zip(zip(problem.results, candidate.strategy.outputs, strict=True), results, strict=True)
            own |= zip(problem.results, nodes[mine].results, strict=True)
        for name, place in resolved.problem.outputs:
            if place is not None:
                values[own[name]] = self._moved(here, resolved, name, place)

    def _moved(
        self, here: dict[tuple[str, Placement], Parts], resolved: Resolved, name: str, place: Placement
    ) -> Parts:
        """A move runs once, however many read what it brings."""
        if (name, place) not in here:
            source = resolved.sources[name]
            here[name, place] = move(here[name, source], source, place)
        return here[name, place]

    def _run(self, node: OpNode, strategy: Strategy, operands: list[Parts]) -> list[Parts]:
        ranks = range(self.degree)
        results = [self._run_rank(node, strategy, tuple(parts[rank] for parts in operands), rank) for rank in ranks]
        return [tuple(rank[i] for rank in results) for i in range(len(node.results))]

    def _run_rank(self, node: OpNode, strategy: Strategy, operands: Parts, rank: int) -> Parts:
        if strategy.local == CONTEXT_ATTENTION:
            length = self.whole[node.operands[0]].shape[-2]
            return (context_attention(node, operands, local_part(torch.arange(length), Shard(0), self.degree, rank)),)
        if not strategy.local:
            local = localize_node(node, strategy, self.degree, rank)
            return as_tuple(plain_call(replace(local, op=ANY_STRIDES.get(node.op, node.op)), operands, CPU))
        denominator = None
        if strategy.local == "cross_entropy_tokens":
            denominator = loss_denominator(node, *(self.whole[name] for name in denominator_operands(node)))
        use = LocalUse(
            node=node,
            shapes=tuple(tuple(self.whole[name].shape) for name in node.operands),
            batch=ALONE,
            tensor=LocalAxis(size=self.degree, coordinate=rank, group=None, form=strategy.local),
            device=CPU,
        )
        return as_tuple(local_call(use, operands, denominator))
