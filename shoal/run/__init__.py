"""Runs: configuration, collecting, training, evaluating, checkpoints, metrics."""
