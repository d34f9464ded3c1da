"""Kernels written whole, where the IR does not reach: tensor cores of a special kind, attention, packing."""
