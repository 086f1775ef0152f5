"""Kernels on GPUs: drivers, memory, compilation at run time. Imports no GPU library by itself."""
