"""The owner thread: submissions and their streams, the core, recovery."""
