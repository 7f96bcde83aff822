"""Uniform sides: integer codes with (min, range) per group."""
