"""Sums over several devices and processes.

`mode.py` chooses the way a step runs: on one device (`one_device.py`), or over a mesh
with a sum on each device (`sum_on_each.py`) or one sum over all (`sum_over_all.py`).
`axes.py` is the view of one device in a map; `own_map.py` is a map of the user's own.
"""
