"""Kernels over pages, each beside the reference that defines it."""
