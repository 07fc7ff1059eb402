"""Models and optimizers of Flax NNX as the states of the plain steps."""
