"""Worlds whose envs live on the CPU: Gymnasium, Atari, PettingZoo and EnvPool, in worker processes or native batches.

A worker process imports only `packing`, `memory`, `envs`, `sources` and `worker`, which do not import torch.
"""
