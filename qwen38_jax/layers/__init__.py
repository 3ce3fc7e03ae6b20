"""The layers as pure functions of (weights, config, activations)."""
