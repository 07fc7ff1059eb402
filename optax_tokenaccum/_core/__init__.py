"""A window's arithmetic: a scalar loss of a tree, its gradient, sums that close.

It knows nothing of devices, steps and models, and imports nothing above it.
"""
