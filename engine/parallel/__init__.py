"""Tensor parallelism over processes: rank 0 schedules and commands, the workers of the other ranks follow."""
