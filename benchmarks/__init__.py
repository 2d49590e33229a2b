"""Figures, printed and kept as data in ``benchmarks/results``. Ratios come from one run."""
