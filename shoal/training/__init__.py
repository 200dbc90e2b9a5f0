"""Training: collecting experience, trainers, several processes, the memory that a run takes."""
