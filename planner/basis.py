"""Bases of keys and values: coefficients that do not vary together, whose errors count alike, in order of variance.

With a metric S and a covariance C of one head, A = S^(1/2) and A C A = U L U^T, L falling,

    c = P x,  P = U^T A;    x = P^-1 c,  P^-1 = A^-1 U;    E[c c^T] = L;    dx^T S dx = |dc|^2.

Keys: S is the second moment of queries times the scale of scores, so |dc|^2 is the squared error of a score. Values: S
is that of the output projection. S is shrunk towards the identity first, since what queries ask differs between texts
more than what keys are. ``shrink`` 1 gives the principal components of the covariance.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FLOOR = 1e-4  # least eigenvalue of a metric, of its largest: P has a condition of at most 100
# Squared error that codes of so many bits leave, per variance of a channel within its block: of 128 samples of a
# Gaussian, with levels at even distances from the least to the largest, 1 bit with levels drawn in by a fifth of the
# range; without codes the mean alone. Measured with the formats' own quantizers, which a test repeats.
GAIN = {0: 1.0, 1: 0.933, 2: 0.251, 4: 0.00996, 8: 3.45e-5}


class Basis(NamedTuple):
    """The matrices P [H, D, D] of a side's heads, and the variances L [H, D] of their coefficients, falling."""

    matrix: Tensor
    spectrum: Tensor


def solve_basis(metric: Tensor, covariance: Tensor, shrink: float) -> Basis:
    """The basis of each head, as this module's formulas have it. Shapes:  metric and covariance [H, D, D] float64"""
    root = square_root(shrunk(metric, shrink))
    values, vectors = torch.linalg.eigh(root @ covariance @ root)
    return Basis(vectors.flip(-1).mT @ root, values.flip(-1).clamp(min=0))


def shrunk(metric: Tensor, shrink: float) -> Tensor:
    """(1 - shrink) S / s + shrink I, s being the mean of S's diagonal; the identity where S is zero. [H, D, D]"""
    size = metric.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    one = torch.eye(metric.shape[-1], dtype=metric.dtype, device=metric.device)
    return torch.where(size > 0, (1 - shrink) * metric / torch.where(size > 0, size, 1) + shrink * one, one)


def square_root(metric: Tensor) -> Tensor:
    """S^(1/2) of symmetric S, eigenvalues at least ``FLOOR`` of the largest. [H, D, D]"""
    values, vectors = torch.linalg.eigh(metric)
    values = torch.maximum(values, FLOOR * values[..., -1:])
    root: Tensor = vectors * values.sqrt()[..., None, :] @ vectors.mT
    return root


def channel_energies(spectrum: Tensor, covariance: Tensor, gradient: Tensor) -> Tensor:
    """What each channel without codes costs, in nats: [H, D].

    The channels of a head share sqrt(tr(G C)), the change of the loss to first order if all of them had none, in the
    ratios of their variances: the metric says what an error does to attention, the gradients G what that does to the
    loss. The root, since squared nats leave too little to heads that a confident reply says nothing of.
    Shapes:  spectrum [H, D];  covariance and gradient [H, D, D]
    """
    whole = (gradient * covariance).sum((-2, -1)).clamp(min=0).sqrt()
    total = spectrum.sum(-1)
    return spectrum * (whole / torch.where(total > 0, total, 1))[:, None]
