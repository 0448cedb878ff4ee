"""Hashing of small integers into 64 well-mixed bits: what sample order and per-sample randomness are made of.

Only integer arithmetic modulo 2**64, so the same numbers come out on every platform and numpy version.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MASK = (1 << 64) - 1
# The odd number nearest 2**64 divided by the golden ratio: its multiples are spread evenly over 64 bits.
GOLDEN = 0x9E3779B97F4A7C15
# Multipliers and shifts of the splitmix64 finaliser, a bijection of 64-bit integers.
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
# Arrays of no dimension: of a scalar numpy would make one each time.
_ARRAY_MULTIPLIERS = tuple(np.array(multiplier, dtype=np.uint64) for multiplier in _MULTIPLIERS)
_ARRAY_SHIFTS = tuple(np.array(shift, dtype=np.uint64) for shift in _SHIFTS)


def mix_number(number: int) -> int:
    """The finaliser for one Python integer."""
    number ^= number >> _SHIFTS[0]
    number = number * _MULTIPLIERS[0] & MASK
    number ^= number >> _SHIFTS[1]
    number = number * _MULTIPLIERS[1] & MASK
    return number ^ number >> _SHIFTS[2]


def mix_in_place(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The same finaliser for a whole array, which it overwrites and returns."""
    numbers ^= numbers >> _ARRAY_SHIFTS[0]
    numbers *= _ARRAY_MULTIPLIERS[0]
    numbers ^= numbers >> _ARRAY_SHIFTS[1]
    numbers *= _ARRAY_MULTIPLIERS[1]
    numbers ^= numbers >> _ARRAY_SHIFTS[2]
    return numbers


def key(*numbers: int) -> int:
    """One 64-bit key for a sequence of integers, such as (seed, epoch)."""
    state = 0
    for number in numbers:
        state = mix_number(((state ^ (number & MASK)) + GOLDEN) & MASK)
    return state
