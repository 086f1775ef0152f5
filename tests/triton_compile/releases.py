"""What Triton has done since which release, where kernels must do without it before.

kernels/triton is written for the oldest one that fastkern takes; these say what checks expect.
"""

SCALAR_SWAP_HAS_ITS_SCOPE = (3, 7)  # AMD; before, a device's
TENSOR_SWAP_IS_MASKED = (3, 8)  # AMD; before, each element is swapped by several threads
WAITS_FOR_WRITE_BACK = (3, 8)  # AMD; before, only where stores are on their way
KEEPS_UNUSED_ACQUIRES = (3, 9)  # before, they go, or the barrier behind them
KEEPS_VOLATILE_LOADS = (3, 9)  # AMD
