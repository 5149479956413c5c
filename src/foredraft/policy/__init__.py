"""How many tokens are drafted in a step, decided from the past alone."""

from foredraft.policy.base import Forecast, PlanRow, Policy, RowOutcome, StepOutcome
from foredraft.policy.cost import DraftCost, PassTable, StepCost
from foredraft.policy.fixed import FixedPolicy
from foredraft.policy.goodput import GoodputPolicy
from foredraft.policy.heuristic import HeuristicPolicy
from foredraft.policy.specdec import SpecDecPolicy
from foredraft.policy.tiers import TiersPolicy

__all__ = [
    "DraftCost",
    "FixedPolicy",
    "Forecast",
    "GoodputPolicy",
    "HeuristicPolicy",
    "PassTable",
    "PlanRow",
    "Policy",
    "RowOutcome",
    "SpecDecPolicy",
    "StepCost",
    "StepOutcome",
    "TiersPolicy",
]
