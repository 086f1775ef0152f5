"""`fastkern demo` and `fastkern train-demo`: a small MoE language model on processes as ranks.

Both: text.py, model.py, launch.py and group.py (ranks as processes), console.py. The demo, one
layer checked and timed: run.py (the whole course), pretrain.py, layer.py (the layer over ranks, and
in one process), copies.py (without deduplication), worker.py (one rank), shaped.py, rows.py,
check.py, report.py. The training: train_run.py (the whole course), training.py (what one process
and a rank do alike), train_worker.py, compare.py, train_report.py.
"""
