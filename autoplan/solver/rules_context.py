"""What an op may do on the context axis: the rules of the table, within limits, and a row for causal attention.

The axis splits the positions of a sequence, or the heads around attention. Limits on a strategy of the table:

    samples      never split: dp does that. A dim that counts samples x positions is split within each sample, so
                 ``Shard(0)`` of ``[B * S, C]`` reads ``Shard(0, blocks=B)``
    parameters   whole, gradients summed over the axis; cut only where they meet activations element by element
    vocabulary   never split, as that would split a parameter

With ``Shard`` on S no promise is made which positions a rank holds: causal attention is balanced when rank i of n has
the i-th and the i-th last of 2n equal pieces, and that is what its price assumes.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autoplan.ir import OpNode, TensorMeta
from autoplan.sharding import REPLICATE, REPLICATE_PARTIAL_GRAD, Placement, Replicate, Shard, Strategy, can_split
from autoplan.solver.batch import BatchSplit
from autoplan.solver.build import Model
from autoplan.solver.problem import Storage
from autoplan.solver.rules import strategies
from autoplan.solver.rules_einsum import Use, normalise
from autoplan.solver.rules_pointwise import POINTWISE
from autoplan.solver.rules_shape import SHAPES
from autoplan.solver.work import ATTENTION_OPS

CONTEXT_ATTENTION = "attention_context"
"""Local form: queries of some positions against all keys, the causal mask by position in the whole sequence."""

_REGROUPING = frozenset(
    f"aten.{name}" for name in (
        "view.default", "reshape.default", "_unsafe_view.default", "flatten.using_ints", "unflatten.int",
    )
)  # fmt: skip
_MAY_CUT_PARAMS = frozenset(POINTWISE) | frozenset(SHAPES)
_VOCABULARY_FORMS = ("embedding_vocab", "cross_entropy_vocab")


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextSetting:
    """What every node's strategies follow from."""

    model: Model
    split: BatchSplit
    samples: int
    """In one microbatch."""
    degree: int
    tensor_degree: int
    """Heads that one rank is left with have to divide by it."""
    length: int
    """Positions of the sequence."""

    def positions(self, value: str) -> Placement:
        """A value split along the sequence, wherever that is: merged with the samples, or a dim of its own.

        Whole where there is no such dim. Of several dims of that size it is the first.
        """
        shape, batch = self.model.graph.metas[value].shape, self.split.placement(value)
        sample_dim = batch.dim if isinstance(batch, Shard) else None
        if self.length % self.degree:
            return REPLICATE
        if sample_dim is not None and shape[sample_dim] == self.samples * self.length:
            return Shard(sample_dim, self.samples)
        own = (Shard(dim) for dim, size in enumerate(shape) if dim != sample_dim and size == self.length)
        return next(own, REPLICATE)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensor:
    """An operand or a result as one node sees it."""

    shape: tuple[int, ...]
    sample_dim: int | None
    """The dim that counts samples, perhaps times something else."""
    is_param: bool = False


def segment_strategies(setting: ContextSetting, nodes: tuple[OpNode, ...]) -> tuple[tuple[Strategy, ...], ...]:
    """For each node of a segment, every way to run it on the context axis that can be of use.

    Of use are splits that follow from one along the positions of some value, or along the heads of attention: with
    whole parameters a split of channels divides no product.
    """
    found = [node_strategies(setting, node) for node in nodes]
    shards = [[_shards(node, strategy) for strategy in ways] for node, ways in zip(nodes, found, strict=True)]
    reached = _reached(_seeds(setting, nodes, found), [pairs for row in shards for pairs in row if pairs])
    return tuple(
        tuple(strategy for strategy, pairs in zip(ways, row, strict=True) if reached.issuperset(pairs))
        for ways, row in zip(found, shards, strict=True)
    )


def _shards(node: OpNode, strategy: Strategy) -> list[Storage]:
    """The values that a strategy reads or makes in parts or as partial sums."""
    pairs = (*zip(node.operands, strategy.inputs, strict=True), *zip(node.results, strategy.outputs, strict=True))
    return [(name, place) for name, place in pairs if not isinstance(place, Replicate)]


def _seeds(setting: ContextSetting, nodes: tuple[OpNode, ...], found: list[tuple[Strategy, ...]]) -> list[Storage]:
    names = dict.fromkeys(name for node in nodes for name in (*node.operands, *node.results))
    seeds: list[Storage] = [(name, setting.positions(name)) for name in names]
    attention = [(node, ways) for node, ways in zip(nodes, found, strict=True) if node.op in ATTENTION_OPS]
    return seeds + [pair for node, ways in attention for strategy in ways for pair in _shards(node, strategy)]


def _reached(seeds: Iterable[Storage], links: list[list[Storage]]) -> set[Storage]:
    """Everything that the links (each a set of splits that go together) connect to the seeds."""
    links_of: dict[Storage, list[list[Storage]]] = defaultdict(list)
    for link in links:
        for pair in link:
            links_of[pair].append(link)
    reached = set(seeds)
    waiting = list(reached)
    while waiting:
        new = {pair for link in links_of.pop(waiting.pop(), ()) for pair in link} - reached
        reached |= new
        waiting += new
    return reached


def node_strategies(setting: ContextSetting, node: OpNode) -> tuple[Strategy, ...]:
    """Every way to run a node on the context axis; the first is the whole op on every rank."""
    model = setting.model
    seen = model.metas_for(node)
    counts = model.block_counts | ({setting.samples} if node.op in _REGROUPING else frozenset())
    found = (
        *strategies(node, seen, model.needs_grad, setting.degree, counts),
        *_attention_rows(setting, node, seen),
    )
    tensors = _tensors(setting, node, seen)
    limited = (_within_limits(setting, node, strategy, tensors) for strategy in found)
    return tuple(dict.fromkeys(strategy for strategy in limited if strategy is not None))


def _tensors(setting: ContextSetting, node: OpNode, seen: Mapping[str, TensorMeta]) -> tuple[_Tensor, ...]:
    """Operands, then results."""
    batch = setting.split.strategy(node.name)
    operands = [
        _Tensor(
            shape=seen[name].shape,
            sample_dim=_dim(place),
            is_param=name.startswith("param:") or (_is_whole(setting, place) and setting.model.needs_grad(name)),
        )
        for name, place in zip(node.operands, batch.inputs, strict=True)
    ]
    results = [
        _Tensor(shape=seen[name].shape, sample_dim=_dim(place))
        for name, place in zip(node.results, batch.outputs, strict=True)
    ]
    return (*operands, *results)


def _dim(place: Placement) -> int | None:
    return place.dim if isinstance(place, Shard) else None


def _is_whole(setting: ContextSetting, place: Placement) -> bool:
    """Whether no sample reaches the value. Unknown where the samples could not be told apart: one sample only."""
    return isinstance(place, Replicate) and not setting.split.obstacle


def _within_limits(
    setting: ContextSetting, node: OpNode, strategy: Strategy, tensors: tuple[_Tensor, ...]
) -> Strategy | None:
    """The strategy as this axis may use it; None if it may not."""
    places = (*strategy.inputs, *strategy.outputs)
    pairs = list(zip(places, tensors, strict=True))
    cuts_param = any(isinstance(place, Shard) and tensor.is_param for place, tensor in pairs)
    if strategy.local in _VOCABULARY_FORMS or (cuts_param and node.op not in _MAY_CUT_PARAMS):
        return None
    if node.op in ATTENTION_OPS and not _leaves_heads(setting, strategy, tensors):
        return None
    if not any(isinstance(place, Shard) and place.dim == tensor.sample_dim for place, tensor in pairs):
        return strategy
    if setting.samples == 1 or _is_within_samples(setting, pairs):
        return strategy
    return None if node.op in _REGROUPING else _within_samples(setting, strategy, pairs)


def _is_within_samples(setting: ContextSetting, pairs: list[tuple[Placement, _Tensor]]) -> bool:
    shards = [(p, t) for p, t in pairs if isinstance(p, Shard)]
    return all(p.blocks == setting.samples for p, t in shards if p.dim == t.sample_dim)


def _within_samples(
    setting: ContextSetting, strategy: Strategy, pairs: list[tuple[Placement, _Tensor]]
) -> Strategy | None:
    """The split of a dim of samples x positions, applied to the positions of each sample.

    An op that lets such a dim be split treats its places alike, whichever of them a rank holds.
    """
    shards = [(place, tensor.shape) for place, tensor in pairs if isinstance(place, Shard)]
    divides = all(can_split(shape[place.dim], setting.degree, setting.samples) for place, shape in shards)
    if not divides or any(place.blocks != 1 for place, _ in shards):
        return None

    def cut(places: tuple[Placement, ...]) -> tuple[Placement, ...]:
        return tuple(Shard(p.dim, setting.samples) if isinstance(p, Shard) else p for p in places)

    return Strategy(inputs=cut(strategy.inputs), outputs=cut(strategy.outputs), local=strategy.local)


def _leaves_heads(setting: ContextSetting, strategy: Strategy, tensors: tuple[_Tensor, ...]) -> bool:
    """Whether the heads that a rank is left with can be split further over the tensor axis."""
    parts = setting.degree * setting.tensor_degree
    return all(
        tensor.shape[place.dim] % parts == 0
        for place, tensor in zip(strategy.inputs[:3], tensors, strict=False)
        if isinstance(place, Shard) and place.dim == len(tensor.shape) - 3
    )


def _attention_rows(setting: ContextSetting, node: OpNode, seen: Mapping[str, TensorMeta]) -> list[Strategy]:
    """Causal attention with split queries: keys and values of all ranks, each query masked by its own position.

    Without a causal flag the rule table has this row in the plain form.
    """
    use = Use(
        node=node,
        inputs=tuple(seen[name] for name in node.operands),
        outputs=tuple(seen[name] for name in node.results),
        degree=setting.degree,
    )
    if node.op not in ATTENTION_OPS or not use.arg(5, "is_causal", False):
        return []
    query, keys = use.inputs[0].shape, use.inputs[1].shape
    rows = len(query) - 2
    if query[rows] != keys[rows] or query[rows] % setting.degree:
        return []
    others = (REPLICATE_PARTIAL_GRAD,) * (len(use.inputs) - 1)
    row = Strategy(inputs=(Shard(rows), *others), outputs=(Shard(rows),), local=CONTEXT_ATTENTION)
    found = normalise(row, use, setting.model.needs_grad)
    return [found] if found is not None else []
