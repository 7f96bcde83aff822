"""Formats of a linear layer's weight, a file each: what a checkpoint has of it, and what is computed with."""
