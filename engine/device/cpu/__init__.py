"""Attention, steps and threads of a CPU."""
