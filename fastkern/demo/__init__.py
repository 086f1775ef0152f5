"""`fastkern demo`: a small MoE language model's layer on processes as ranks, checked and timed.

Reading order: run.py (the whole course), text.py, gate.py (model and training), layer.py (the layer
in one process and in pieces over ranks), worker.py (one rank), launch.py, check.py, report.py.
"""
