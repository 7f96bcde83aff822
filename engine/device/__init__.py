"""What computes a step: the runner, its GPU steps and graphs, pinned memory, threads."""
