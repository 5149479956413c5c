"""How many tokens are drafted in a step, decided from the past alone."""

from foredraft.policy.base import Forecast, PlanRow, Policy, RowOutcome, StepOutcome
from foredraft.policy.cost import DraftCost, PassTable, StepCost
from foredraft.policy.fixed import FixedPolicy
from foredraft.policy.goodput import GoodputPolicy

__all__ = [
    "DraftCost",
    "FixedPolicy",
    "Forecast",
    "GoodputPolicy",
    "PassTable",
    "PlanRow",
    "Policy",
    "RowOutcome",
    "StepCost",
    "StepOutcome",
]
