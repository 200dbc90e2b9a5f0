"""3-D scenes: loading, checking, procedural houses, search trees, and the pool that shares scenes among envs."""
