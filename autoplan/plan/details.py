"""JSON values -> the parts of a Plan that explain it: its proof, the other choices, precision and origin."""

from autoplan.plan import reading
from autoplan.plan.encode import PRECISION_KEYS
from autoplan.plan.plan import SEARCH_STATUS, Choice, Origin, Precision, Proof
from autoplan.plan.reading import Place, fail, items, members


def proof_from_json(place: Place) -> Proof:
    """How good the plan is."""
    counts = ("num_solved", "num_bounded", "num_refused")
    at = members(place, ("status", "bound_us", "bound_by", *counts, "refusals"))
    return Proof(
        status=reading.choice(at["status"], SEARCH_STATUS),
        bound_us=reading.number(at["bound_us"]),
        bound_by=reading.text(at["bound_by"]),
        num_solved=reading.whole(at["num_solved"]),
        num_bounded=reading.whole(at["num_bounded"]),
        num_refused=reading.whole(at["num_refused"]),
        refusals=tuple(_refusal(item) for item in items(at["refusals"])),
    )


def _refusal(place: Place) -> tuple[str, int]:
    found = items(place)
    if len(found) != 2:
        fail(place, f"expected a reason and a count, found {len(found)} items")
    return reading.text(found[0]), reading.whole(found[1])


def choice_from_json(place: Place) -> Choice:
    """One of the good plans."""
    at = members(place, ("label", "step_us", "peak_bytes", "on_front"))
    return Choice(
        label=reading.text(at["label"]),
        step=reading.amounts(at["step_us"]),
        peak_bytes=reading.whole(at["peak_bytes"]),
        on_front=reading.flag(at["on_front"]),
    )


def precision_from_json(place: Place) -> Precision:
    """Dtypes beside that of the parameters."""
    at = members(place, PRECISION_KEYS)
    return Precision(**{name: reading.optional_text(at[name]) for name in PRECISION_KEYS})


def origin_from_json(place: Place) -> Origin:
    """Where the model came from."""
    at = members(place, ("model", "cluster", "seq_len", "dtype", "options"))
    return Origin(
        model=reading.text(at["model"]),
        cluster=reading.text(at["cluster"]),
        seq_len=reading.optional_whole(at["seq_len"]),
        dtype=reading.text(at["dtype"]),
        options=tuple(reading.pair(item) for item in items(at["options"])),
    )
