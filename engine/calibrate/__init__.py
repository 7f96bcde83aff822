"""From a model's gradients to a plan: a ladder whose formats differ by layer, kept in a file with its reasons."""
