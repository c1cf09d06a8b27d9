"""Flags of a user -> Constraints of a model: the grammar, and every mistake that can be seen before the search.

    pin     PATTERN=tp:PLACEMENT        layers.*.mlp.w1.weight=tp:Shard(0)
    forbid  PATTERN=tp:PLACEMENT        the same parameters may not lie so
            NAME=VALUE                  schedule=zbv, tp=8; the names are those of ``CHOICES``
    keep    PATTERN                     lm_head, layers.*.mlp: every op below is whole on the tensor axis

In a PATTERN ``*`` stands for one part of a name, or for some letters of one (``w*``), so that the patterns of a plan
file mean here what they mean there; ``**`` stands for any number of parts. A PLACEMENT is that of ``sharding.py`` and
no other: ``Shard(0)`` is not ``Shard(0, blocks=3)``, ``Replicate`` is not ``Replicate(partial_grad)``.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from autoplan.errors import InputError
from autoplan.ir import Param, SegmentedGraph, TensorMeta
from autoplan.plan.patterns import by_pattern, pattern_of
from autoplan.sharding import Partial, Placement, Shard, can_split, parse_placement
from autoplan.solver.constraints import CHOICES, Ban, Constraints, Flag, Value, Wish
from autoplan.solver.request import Request

EXAMPLE = "layers.*.mlp.w1.weight=tp:Shard(0)"
_PLACEMENTS = ("Shard(0)", "Shard(1)", "Shard(0, blocks=3)", "Replicate", "Replicate(partial_grad)")
_MOST_NAMES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class _Named:
    """A wish and the name under which it found its parameter."""

    name: str
    wish: Wish


def parse_constraints(request: Request, sg: SegmentedGraph) -> Constraints:
    """What ``request`` pins, forbids and keeps, by the names of the model.

    Raises InputError for a flag that is not understood, matches nothing, cannot be for any degree or contradicts
    another flag.
    """
    params = _params_by_name(sg)
    required = _required(request, params)
    forbids = [Flag(name="forbid", text=text) for text in request.forbid]
    forbidden = _forbidden([flag for flag in forbids if _is_placed(flag)], params)
    bans = tuple(_ban(flag) for flag in forbids if not _is_placed(flag))
    kept, whole = _kept(request, sg, params)
    _check_pin_against_forbid(required, forbidden)
    _check_pin_against_keep(required, whole)
    _check_bans(request, bans)
    splits = (named.wish.flag for named in required.values() if isinstance(named.wish.placement, Shard))
    return Constraints(
        required={value: named.wish for value, named in required.items()},
        forbidden={value: tuple(wishes) for value, wishes in forbidden.items()},
        whole=whole,
        kept=kept,
        bans=bans,
        split_by=next(splits, None),
    )


def stands_for(pattern: str, name: str) -> bool:
    """Whether a name is one of the pattern's."""
    return _stand_for(pattern.split("."), name.split("."))


def _stand_for(pattern: Sequence[str], name: Sequence[str]) -> bool:
    if not pattern:
        return not name
    if pattern[0] == "**":
        return any(_stand_for(pattern[1:], name[i:]) for i in range(len(name) + 1))
    return bool(name) and fnmatchcase(name[0], pattern[0]) and _stand_for(pattern[1:], name[1:])


def _params_by_name(sg: SegmentedGraph) -> dict[str, Param]:
    """The parameters that some segment reads, under every name they have."""
    read = {value for segment in sg.segments for value in segment.params}
    found = [param for param in sg.graph.params if param.value in read]
    return {name: param for param in found for name in (param.name, *param.aliases)}


# the grammar


def _is_placed(flag: Flag) -> bool:
    """Whether a forbid speaks of a placement rather than of a choice of level 0."""
    return ":" in flag.text.partition("=")[2]


def _placed(flag: Flag) -> tuple[str, Placement]:
    """Pattern and placement of ``PATTERN=tp:PLACEMENT``."""
    pattern, equals, rest = flag.text.partition("=")
    axis, colon, placement = rest.partition(":")
    if not (pattern and equals and colon):
        raise InputError(f"{flag} is not understood; expected PATTERN=tp:PLACEMENT, such as {EXAMPLE}{_degree(flag)}")
    if axis != "tp":
        raise InputError(
            f"{flag} names the axis {axis!r}; parameters are placed on tp, as in {EXAMPLE}. How data ranks share them "
            "follows from data and shards"
        )
    try:
        found = parse_placement(placement)
    except ValueError as err:
        raise InputError(f"{flag}: {err}{_near(placement, _PLACEMENTS)}") from err
    if isinstance(found, Partial):
        raise InputError(f"{flag}: a parameter is never Partial; use Shard(DIM), Replicate or Replicate(partial_grad)")
    return pattern, found


def _degree(flag: Flag) -> str:
    name = flag.text.partition("=")[0]
    return f". A pinned {name} is a flag of its own, --{name}" if name in CHOICES else ""


def _ban(flag: Flag) -> Ban:
    """Name and value of ``NAME=VALUE``."""
    name, equals, text = flag.text.partition("=")
    if not equals or name not in CHOICES:
        raise InputError(
            f"{flag} is not understood; expected PATTERN=tp:PLACEMENT, such as {EXAMPLE}, or NAME=VALUE with NAME one "
            f"of {', '.join(CHOICES)}{_near(name, tuple(CHOICES))}"
        )
    words = CHOICES[name]
    if words and text not in words:
        raise InputError(f"{flag}: {name} has no value {text!r}; it is one of {', '.join(words)}{_near(text, words)}")
    if not words and not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise InputError(f"{flag}: {name} is a whole number from 1, found {text!r}")
    value: Value = text if words else int(text)
    return Ban(flag=flag, name=name, value=text == "true" if name == "offload" else value)


def _near(text: str, known: Sequence[str]) -> str:
    close = get_close_matches(text, known, n=3)
    return f"; did you mean {' or '.join(close)}?" if close else ""


# parameters


def _matching(flag: Flag, pattern: str, params: Mapping[str, Param]) -> list[str]:
    found = [name for name in params if stands_for(pattern, name)]
    if found:
        return found
    folded = tuple(by_pattern(tuple(params)))
    for wider in (".".join("**" if part == "*" else part for part in pattern.split(".")), f"{pattern}.**"):
        if any(stands_for(wider, name) for name in params):
            raise InputError(
                f"{flag} matches no parameter: * stands for one part of a name, ** for any number of parts; "
                f"{wider} would match, for example, {next(name for name in params if stands_for(wider, name))}"
            )
    hint = _near(pattern_of(pattern), folded) or f"; there are {_listed(folded)}"
    raise InputError(f"{flag} matches no parameter that an op of the model reads{hint}")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST_NAMES]) + (f" and {len(names) - _MOST_NAMES} more" * (len(names) > _MOST_NAMES))


def _required(request: Request, params: Mapping[str, Param]) -> dict[str, _Named]:
    found: dict[str, _Named] = {}
    for flag in (Flag(name="pin", text=text) for text in request.pins):
        pattern, placement = _placed(flag)
        for name in _matching(flag, pattern, params):
            if misfit := _misfit(params[name].meta, placement):
                raise InputError(f"{flag} cannot be: {name} {params[name].meta} {misfit}")
            if request.tp == 1 and isinstance(placement, Shard):
                raise InputError(f"{flag} splits {name} over tp, but tp=1 is pinned: leave one of the two out")
            new = _Named(name=name, wish=Wish(flag=flag, placement=placement))
            old = found.setdefault(params[name].value, new)
            if old.wish.placement != placement:
                raise InputError(f"{old.wish.flag} and {flag} contradict each other: {_common(old.name, name)}")
    return found


def _common(first: str, second: str) -> str:
    if first == second:
        return f"both place {first}, which lies in one way. Leave one of the two out"
    return f"{first} and {second} are names of one tensor (tied), which lies in one way. Leave one of the two out"


def _misfit(meta: TensorMeta, placement: Placement) -> str:
    """Why no degree splits a tensor of this shape so; empty if some degree does."""
    if not isinstance(placement, Shard):
        return ""
    if placement.dim >= len(meta.shape):
        return f"has no dim {placement.dim}; its dims are {', '.join(map(str, range(len(meta.shape)))) or 'none'}"
    size, blocks = meta.shape[placement.dim], placement.blocks
    if any(can_split(size, degree, blocks) for degree in range(2, size + 1)):
        return ""
    blocked = f" in {blocks} equal blocks" * (blocks > 1)
    return f"has {size} along dim {placement.dim}, which no degree splits{blocked}"


def _forbidden(flags: Iterable[Flag], params: Mapping[str, Param]) -> dict[str, list[Wish]]:
    found: dict[str, list[Wish]] = {}
    for flag in flags:
        pattern, placement = _placed(flag)
        names = _matching(flag, pattern, params)
        misfits = [_misfit(params[name].meta, placement) for name in names]
        if all(misfits):
            raise InputError(
                f"{flag} forbids nothing: {names[0]} {params[names[0]].meta} {misfits[0]}. Leave it out, or name the "
                "placement that you mean"
            )
        for name in names:
            wishes = found.setdefault(params[name].value, [])
            if all(wish.placement != placement for wish in wishes):
                wishes.append(Wish(flag=flag, placement=placement))
    return found


# modules


def _kept(request: Request, sg: SegmentedGraph, params: Mapping[str, Param]) -> tuple[dict[str, Flag], dict[str, Flag]]:
    """Ops and parameters of the modules to leave whole; the first flag that names one is kept with it."""
    path_of = {node.name: node.module_path for node in sg.graph.nodes}
    kept: dict[str, Flag] = {}
    whole: dict[str, Flag] = {}
    for flag in (Flag(name="keep", text=text) for text in request.keep):
        modules = {path: stands_for(flag.text, path) for path in _modules(path_of.values(), params)}
        if not any(modules.values()):
            raise InputError(f"{flag} matches no module that has an op or a parameter{_near_modules(flag, modules)}")
        for segment in sg.segments:
            for name in segment.nodes:
                if any(modules[path] for path in _parents(path_of[name])):
                    kept.setdefault(name, flag)
        for name, param in params.items():
            if any(modules[path] for path in _parents(_module_of(name))):
                whole.setdefault(param.value, flag)
    return kept, whole


def _near_modules(flag: Flag, modules: Iterable[str]) -> str:
    folded = tuple(by_pattern(tuple(modules)))
    return _near(pattern_of(flag.text), folded) or f"; there are {_listed(folded)}"


def _modules(paths: Iterable[str], params: Iterable[str]) -> list[str]:
    """Every module of the model that has an op or a parameter, with those around it, in order of appearance."""
    all_paths = dict.fromkeys((*paths, *map(_module_of, params)))
    return list(dict.fromkeys(parent for path in all_paths for parent in _parents(path)))


def _module_of(param: str) -> str:
    return param.rpartition(".")[0]


def _parents(path: str) -> Iterator[str]:
    """The module itself and those around it, the outermost first; none for the model itself."""
    parts = path.split(".") if path else []
    return (".".join(parts[: end + 1]) for end in range(len(parts)))


# contradictions


def _check_pin_against_forbid(required: Mapping[str, _Named], forbidden: Mapping[str, list[Wish]]) -> None:
    for value, named in required.items():
        for wish in forbidden.get(value, ()):
            if wish.placement == named.wish.placement:
                raise InputError(
                    f"{named.wish.flag} and {wish.flag} contradict each other: both speak of {wish.placement} for "
                    f"{named.name}. Leave one of the two out"
                )


def _check_pin_against_keep(required: Mapping[str, _Named], whole: Mapping[str, Flag]) -> None:
    for value, named in required.items():
        if value in whole and isinstance(named.wish.placement, Shard):
            raise InputError(
                f"{named.wish.flag} and {whole[value]} contradict each other: one splits {named.name}, the other "
                "leaves it whole. Leave one of the two out"
            )


def _check_bans(request: Request, bans: tuple[Ban, ...]) -> None:
    """Refuse a pinned value that is forbidden, and a choice of which every value is."""
    for name in CHOICES:
        flags = {ban.value: ban.flag for ban in bans if ban.name == name}
        possible = _possible(request, name)
        if not possible or any(value not in flags for value in possible):
            continue
        texts = ", ".join(str(flags[value]) for value in possible)
        if name == "offload" and not request.offload:
            raise InputError(f"{texts} leaves nothing: offload is not allowed; allow it, or leave the forbid out")
        if len(possible) == 1:
            raise InputError(f"{texts} excludes the pinned {name}={possible[0]}: leave one of the two out")
        raise InputError(f"{texts} leave no value of {name}: leave one of them out")


def _possible(request: Request, name: str) -> tuple[Value, ...]:
    """The values left to a choice before forbids; empty where any whole number may be."""
    if name == "offload":
        return (False, True) if request.offload else (False,)
    pinned: Value | None = getattr(request, name)
    return CHOICES[name] if pinned is None else (pinned,)
