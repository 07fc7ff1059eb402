"""Sequences of many lengths in micro-batches of few shapes."""
