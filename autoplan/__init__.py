"""autoplan: plan how to train a PyTorch model in parallel, explain the plan, and run it.

``search`` and ``compile`` (and ``clip_grad_norm_``) need torch and load on first use; the rest is plain Python.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from autoplan.errors import AutoplanError, InfeasibleError, InputError, PlanError, RuleError, TraceError
from autoplan.plan.plan import Plan

if TYPE_CHECKING:
    from autoplan.api import clip_grad_norm_, compile
    from autoplan.planning import search

__version__ = "0.1.0"

__all__ = [
    "AutoplanError",
    "InfeasibleError",
    "InputError",
    "Plan",
    "PlanError",
    "RuleError",
    "TraceError",
    "clip_grad_norm_",
    "compile",
    "search",
]

_TORCH_NAMES = {"clip_grad_norm_": "autoplan.api", "compile": "autoplan.api", "search": "autoplan.planning"}


def __getattr__(name: str) -> object:
    """Load the names that need torch when they are asked for."""
    if name in _TORCH_NAMES:
        return getattr(import_module(_TORCH_NAMES[name]), name)
    raise AttributeError(f"module 'autoplan' has no attribute {name!r}")
