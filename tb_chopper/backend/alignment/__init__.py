"""Counters onto kernels, samples onto kernels, clocks onto clocks."""
