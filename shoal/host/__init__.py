"""Worlds that live on the host: Gymnasium, Atari and PettingZoo environments in CPU processes or native batches.

What a worker process imports (`packing`, `memory`, `envs`, `sources`, `worker`) stays free of torch.
"""
