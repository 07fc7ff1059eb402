"""A window on one device: add micro-batches, close, divide once.

Nothing here makes a mesh, a plan or a program. CONTRIBUTING has the order to read in.
"""
