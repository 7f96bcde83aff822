"""Calibration: from a model's gradients to a plan, a ladder of formats by layer, kept in a file with its reasons."""
