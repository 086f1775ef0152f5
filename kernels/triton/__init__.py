"""The persistent kernels in Triton: one file for NVIDIA and AMD, reading the same stage table and
flags as `kernels/body`. See kernels/README.md."""
