"""Sums over several devices and processes.

A step runs on one device (`one_device.py`) or in one of two modes over a mesh
(`modes.py`). Each has a layout of its sums: `axes.py` as one device sees them,
`layouts.py` as the whole mesh does.
"""
