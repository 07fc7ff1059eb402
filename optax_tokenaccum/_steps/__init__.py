"""Jitted steps: `train_step.py` runs one micro-batch a call, `window_step.py` a window.

Both are made of a `Program`: a pure function of a state, jitted so that every array
stays where it is.
"""
