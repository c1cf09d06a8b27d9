"""Hardware profiles and the cost model built on them; needs no device and no torch."""

from autoplan.cost_models.content import Source
from autoplan.cost_models.hardware import known_profiles, load_cluster, load_profile, load_profile_text
from autoplan.cost_models.model import ProfileCostModel
from autoplan.cost_models.profile import Curve, Link, Profile

__all__ = [
    "Curve",
    "Link",
    "Profile",
    "ProfileCostModel",
    "Source",
    "known_profiles",
    "load_cluster",
    "load_profile",
    "load_profile_text",
]
