"""Model definitions and their loader. Models know tensors and checkpoints, not requests, schedules or KV formats."""
