"""Whether the ops of a folded graph that write in place keep to themselves, so that folding cannot hide a write.

Between marks a layer works on copies of its arguments, and what it returns is a copy too. That is the same as without
marks if nothing is written that both sides of a mark could share: a layer writes only to what it made itself, returns
only what it made itself, each tensor on its own, and nothing is written to what came in through a mark.
"""

from torch import fx

from autoplan.trace.compat import memory_of, mutates, op_name, written_arguments
from autoplan.trace.fold import MARK_IN, MARK_OUT, CannotFold
from autoplan.trace.unfold import Region


def refuse_shared_writes(module: fx.GraphModule, regions: dict[int, Region]) -> None:
    """Raise CannotFold where a write could be seen on the other side of a mark."""
    for part in module.modules():
        if part is not module and isinstance(part, fx.GraphModule) and _writes(part.graph):
            raise CannotFold("the model writes in place inside no_grad or autocast")
    region_of = _regions_by_node(regions)
    makers: dict[int | None, fx.Node] = {}
    for node in module.graph.nodes:
        makers.setdefault(memory_of(node.meta.get("val")), node)
    for node in _writes(module.graph):
        for position in written_arguments(node.target):
            maker = _maker(node.args[position], makers)
            if op_name(maker.target) == MARK_IN or region_of.get(maker) != region_of.get(node):
                raise CannotFold(f"{node.name} writes to a tensor that a layer shares with the rest of the model")
    for mark in module.graph.nodes:
        if op_name(mark.target) == MARK_OUT and mark.args[1] not in regions:
            raise CannotFold(f"{mark.name} returns what has no place in a layer, in a model that writes in place")
    for number, region in regions.items():
        made = [_maker(mark.args[0], makers) for mark in region.outputs.values()]
        if any(region_of.get(maker) != number for maker in made):
            raise CannotFold(f"{region.path} returns a view of what it was given, in a model that writes in place")
        if len(set(made)) != len(made):
            raise CannotFold(f"{region.path} returns two views of one tensor, in a model that writes in place")


def _maker(value: object, makers: dict[int | None, fx.Node]) -> fx.Node:
    """The node that made the memory in which a value lies."""
    memory = memory_of(value.meta.get("val")) if isinstance(value, fx.Node) else None
    if memory is None:
        raise CannotFold(f"{value} is written to or returned, and its memory is not known")
    return makers[memory]


def _writes(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function" and mutates(node.target)]


def _regions_by_node(regions: dict[int, Region]) -> dict[fx.Node, int]:
    """Innermost region of each node: regions lie within each other or apart."""
    found: dict[fx.Node, int] = {}
    for number, region in sorted(regions.items(), key=lambda item: -len(item[1].nodes)):
        found |= dict.fromkeys(region.nodes, number)
    return found
