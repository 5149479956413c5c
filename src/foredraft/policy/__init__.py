"""How many tokens to draft: decided before the step, from the past only."""

from foredraft.policy.fixed import FixedPolicy

__all__ = ["FixedPolicy"]
