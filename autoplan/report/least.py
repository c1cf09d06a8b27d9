"""The fewest devices in words: the answer, what was tried, and what was short with fewer."""

from autoplan.plan.outcome import Least, Tried
from autoplan.plan.words import bytes_text, count_text, table

_TOP = 3


def least_text(least: Least) -> str:
    """The answer first."""
    count = count_text(least.cluster.num_devices, "device")
    lines = [f"The fewest devices on which it fits: {count} ({least.cluster})", ""]
    rows = [(str(each.cluster), "yes" if each.fits else "no", _why(each)) for each in least.tried]
    return "\n".join([*lines, *table(("tried", "fits", "what limits it"), rows, align="<<<", wrap=(2,))]) + "\n"


def _why(tried: Tried) -> str:
    short = tried.shortfall
    if short is None:
        return tried.reason
    causes = ", ".join(f"{cause} {bytes_text(amount)}" for cause, amount in short.by_cause[:_TOP])
    missing, limit = bytes_text(short.missing_bytes), bytes_text(short.limit_bytes)
    return f"stage {short.stage} is short by {missing} of {limit}: {causes}"
