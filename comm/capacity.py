"""How many slots a fixed-shape buffer reserves, in exact integer arithmetic. Imports no jax.

Two limits: the *physical* capacity is static and shapes the buffers; the *logical* one counts only valid
(non-padding) assignments, is traced, and never exceeds the physical one, so padding neither uses slots nor
changes shapes.
"""

import math
from fractions import Fraction
from typing import Any

_INT32_LIMIT = 2**31


def exact_factor(capacity_factor: float) -> Fraction:
    """The factor as it is written, so that 1.15 means 23/20 and not the float just below it.

    Raises:
        ValueError: not positive and finite, or so many digits that `logical_capacity` could overflow int32.

    >>> exact_factor(1.15)
    Fraction(23, 20)
    """
    if not 0 < capacity_factor < math.inf:
        raise ValueError(f"capacity factor {capacity_factor} gives no slots; set a finite factor above 0, such as 1.15")
    factor = Fraction(str(capacity_factor))
    if factor.numerator * factor.denominator >= _INT32_LIMIT:
        raise ValueError(f"capacity factor {capacity_factor} has too many digits; write it with at most four decimals")
    return factor


def capacity(num_assignments: int, *, num_bins: int, capacity_factor: float) -> int:
    """Slots each of `num_bins` equal bins reserves for its share of `num_assignments`. Never zero.

    capacity = max(1, ceil(capacity_factor * num_assignments / num_bins))
    A bin is whatever fills up on its own: an expert, a destination rank in one wave, a (sender, expert) cell.

    Args:
        num_assignments: tokens routed together times `top_k` (one rank's share, not the global batch).
    Raises:
        ValueError: a count is below 1, or the factor is not positive.
    Source: Fedus et al. 2021 (Switch Transformer), expert capacity, times `top_k`.

    >>> capacity(2 * 1024, num_bins=8, capacity_factor=1.25)
    320
    """
    if num_assignments < 1 or num_bins < 1:
        raise ValueError(f"capacity of {num_assignments} assignments in {num_bins} bins; both must be at least 1")
    return max(1, math.ceil(exact_factor(capacity_factor) * num_assignments / num_bins))


def logical_capacity(num_valid: Any, *, num_bins: int, capacity_factor: float, physical: int) -> Any:
    """The same rule for a traced int32 number of valid assignments, clipped to 1..`physical`.

    With the factor as p/q: ceil(ceil(p * v / q) / num_bins), where p * v is split at multiples of q so that
    no intermediate exceeds int32 while capacity_factor * v fits in it. Floats would round some counts one
    slot up.

    Args:
        num_valid: integer array of any framework; it needs `//`, `%` and `.clip`.
    """
    factor = exact_factor(capacity_factor)
    whole, rest = num_valid // factor.denominator, num_valid % factor.denominator
    rows = factor.numerator * whole - (-factor.numerator * rest) // factor.denominator
    return (-(-rows // num_bins)).clip(1, physical)
