"""Measuring: the formulas of the counts, workloads, and the benchmark with its peers."""
