"""Benchmarks. Figures are printed, and stored in ``benchmarks/results``. Ratios come from one run."""
