"""A mixture-of-experts layer on dispatch and combine, in plain PyTorch.

Reading order: layer.py (the layer), one_process.py (the same exchange without ranks, by its
definition), sharing.py (what a training loop needs: weights and gradients of spread models).
"""

from .layer import Exchange, ExpertParallelMoE, Mlp, TopKGate
from .one_process import OneProcess
from .sharing import load_whole_state, replicated_parameters, sum_gradients, whole_state

__all__ = [
    "Exchange",
    "ExpertParallelMoE",
    "Mlp",
    "OneProcess",
    "TopKGate",
    "load_whole_state",
    "replicated_parameters",
    "sum_gradients",
    "whole_state",
]
