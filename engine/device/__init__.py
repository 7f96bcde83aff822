"""Steps on the device: the runner, GPU steps and graphs, pinned memory, threads."""
