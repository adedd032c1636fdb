"""Sums of products that come out the same in whatever order they are added, so that they can be made on any number of
processes.

Numbers that are multiples of a common spacing, and not too large for it, add up without rounding. So each batch's
products, which are float32, are rounded to such a spacing first: about 2^-50 of a bound of the total, where float32
itself holds 2^-24 of each product.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

BITS = 50
"""A total has 53: two for rounding to the spacing, one for products that are larger than they should be."""


def rounder(bound: float) -> float:
    """For products whose magnitudes add up to at most `bound`: what `rounded` adds and takes away again."""
    return 1.5 * 2.0**52 * 2.0 ** (math.frexp(bound)[1] - BITS)


def rounded(products: Tensor, rounder: float) -> Tensor:
    """In float64, to the nearest multiple of the spacing."""
    return products.to(torch.float64, copy=True).add_(rounder).sub_(rounder)
