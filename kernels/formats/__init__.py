"""Page formats: one folder a family."""
