"""The planner: traffic matrix in, stage table out."""

from .api import Plan, Policy, Topology, plan
from .table import StageTable

__all__ = ["Plan", "Policy", "StageTable", "Topology", "plan"]
