"""Models: parameters in Flax NNX modules, everything else in arguments and results."""
