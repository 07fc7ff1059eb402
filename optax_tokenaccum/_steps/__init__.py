"""Programs: a micro-batch or a window of them, and an update."""
