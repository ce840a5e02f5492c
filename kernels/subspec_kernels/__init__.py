"""Kernels of SubSpec: one folder an operation, the plain torch reference in each."""
