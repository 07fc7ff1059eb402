"""Models and optimizers of Flax NNX as the states of the core's steps."""
