"""Training: rollout collection, trainers, data-parallel processes, memory estimates."""
