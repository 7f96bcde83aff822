"""Attention, steps, captured graphs and their shapes of a CUDA device."""
