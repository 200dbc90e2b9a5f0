"""Rollouts, replay, returns, losses and optimizers. Nothing here knows a world."""
