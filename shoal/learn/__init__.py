"""Rollouts, replay, returns, losses and optimizers, independent of worlds."""
