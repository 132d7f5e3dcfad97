"""Small models with mechanisms set by hand, and how often the analyses name them: `python -m interp.selftest`."""

from interp.planted.models import KINDS, Planting, plant
from interp.planted.pairs import make_pairs
from interp.planted.trial import Outcome, try_planting

__all__ = ["KINDS", "Outcome", "Planting", "make_pairs", "plant", "try_planting"]
