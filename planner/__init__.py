"""The planner: traffic matrix in, stage table out."""

from .api import MoePlan, Plan, Policy, Topology, plan, plan_moe
from .table import StageTable

__all__ = ["MoePlan", "Plan", "Policy", "StageTable", "Topology", "plan", "plan_moe"]
