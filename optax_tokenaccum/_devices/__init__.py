"""Sums over several devices and processes.

A step runs in one of three modes (`modes.py`), each with a layout of its sums
(`axes.py` as one device sees them, `layouts.py` as the whole mesh does).
"""
