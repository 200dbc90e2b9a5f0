"""Runs: folders, checkpoints, metrics, evaluation, starting and resuming."""
