"""The sharding rules: which placements of its operands an op can take, and which its results then have.

Ops are data: ``RULES`` maps the full name of an op to a rule written like an einsum (``rules_einsum.py``), in five
tables by kind of op. A new op is one row here and one sample in ``tests/solver/test_rules.py``, whose property test
runs every strategy of every row against the whole op.
"""

from collections.abc import Callable, Iterable, Mapping

from autoplan.errors import RuleError
from autoplan.ir import Graph, OpNode, TensorMeta
from autoplan.sharding import REPLICATE, Strategy
from autoplan.solver.rules_einsum import Rule, Use, normalise, strategies_of
from autoplan.solver.rules_experts import EXPERTS
from autoplan.solver.rules_matmul import MATMULS
from autoplan.solver.rules_pointwise import FACTORIES, POINTWISE
from autoplan.solver.rules_reduce import REDUCTIONS
from autoplan.solver.rules_shape import SHAPES

RULES: Mapping[str, Rule] = {**POINTWISE, **FACTORIES, **MATMULS, **REDUCTIONS, **SHAPES, **EXPERTS}
"""Full op name to its rule."""

_SPLITS = ("aten.split.Tensor", "aten.split_with_sizes.default", "aten.chunk.default")


def strategies(
    node: OpNode,
    metas: Mapping[str, TensorMeta],
    needs_grad: Callable[[str], bool],
    degree: int,
    block_counts: frozenset[int] = frozenset(),
) -> tuple[Strategy, ...]:
    """Every legal way to run ``node`` on an axis of ``degree``, without communication; the same order every time.

    ``metas`` gives the shapes of operands and results before this split. ``needs_grad`` says of a value whether a
    gradient flows to it; where none does, strategies say Replicate and never Replicate(partial_grad). Values that
    are not floats are never Partial. The first strategy is the whole op on every rank.
    Raises RuleError for an op without a rule.
    """
    check_rules((node,))
    use = Use(
        node=node,
        inputs=tuple(metas[name] for name in node.operands),
        outputs=tuple(metas[name] for name in node.results),
        degree=degree,
        block_counts=tuple(sorted(block_counts)),
    )
    if degree == 1:
        return (Strategy(inputs=(REPLICATE,) * len(use.inputs), outputs=(REPLICATE,) * len(use.outputs)),)
    found = (normalise(strategy, use, needs_grad) for strategy in strategies_of(RULES[node.op](use), use))
    return tuple(dict.fromkeys(strategy for strategy in found if strategy is not None))


def check_rules(nodes: Iterable[OpNode]) -> None:
    """Raise RuleError that lists every op without a rule, with the first place where it is used."""
    missing: dict[str, OpNode] = {}
    for node in nodes:
        if node.op not in RULES:
            missing.setdefault(node.op, node)
    if missing:
        places = "\n".join(f"  {node.where}" for node in missing.values())
        raise RuleError(
            f"no sharding rule covers {len(missing)} op(s) of the model:\n{places}\n"
            "Write these lines with ops that have a rule, or add a row (CONTRIBUTING.md says how)."
        )


def block_counts_in(nodes: Iterable[OpNode]) -> frozenset[int]:
    """Numbers of equal parts that ``split`` and ``chunk`` cut a tensor into: 3 for a merged query-key-value."""
    return frozenset(
        len(node.outputs)
        for node in nodes
        if node.op in _SPLITS and len(node.outputs) > 1 and len({meta.shape for meta in node.outputs}) == 1
    )


def grad_values(graph: Graph) -> frozenset[str]:
    """Values that a gradient flows to: trainable parameters, and floats computed from them."""
    found = {param.value for param in graph.params if param.trainable}
    for node in graph.nodes:
        if node.op != "aten.detach.default" and node.op not in FACTORIES and found.intersection(node.operands):
            found.update(name for name, meta in zip(node.results, node.outputs, strict=True) if meta.is_float)
    return frozenset(found)
