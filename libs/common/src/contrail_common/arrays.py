"""Arrays of numbers: what numpy does too slowly for the event loop."""

from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

_T = TypeVar("_T", bound=np.integer)
_CONSECUTIVE: Final = np.arange(2_048, dtype=np.intp)
_CONSECUTIVE.flags.writeable = False


def consecutive(start: int, stop: int) -> NDArray[np.intp]:
    """Return the numbers from ``start`` up to ``stop``; the array may be read-only.

    ``np.arange`` gives up the interpreter's lock, however few they are, and a thread that waits for
    it takes its turn.
    """
    return _CONSECUTIVE[start:stop] if stop <= len(_CONSECUTIVE) else np.arange(start, stop)


def distinct(values: NDArray[_T]) -> NDArray[_T]:
    """Return the different integers of ``values``, ascending.

    ``np.unique`` takes 15 times as long for 100,000 different ones (numpy 2.4 puts them into a hash
    table), and its first call in a process imports ``numpy.ma``, which takes 80 ms.
    """
    # After sorting, each value that differs from the one before it is the first of its kind.
    ascending = np.sort(values)
    first = np.ones(len(ascending), np.bool_)
    np.not_equal(ascending[1:], ascending[:-1], out=first[1:])
    return ascending[first]


def compact(values: NDArray[_T]) -> NDArray[_T]:
    """Return ``values`` as an array that has only one of them in memory, if all are equal."""
    if values.size <= 1:
        return values
    # Not compared by numpy: above 500 elements it gives up the interpreter's lock, and a thread may
    # wait for milliseconds to get it back.
    data = values.tobytes()
    one = data[: values.itemsize]
    if data != one * values.size:
        return values
    return np.ndarray(values.shape, values.dtype, one, strides=(0,))


def spared_bytes(values: NDArray[_T]) -> int:
    """Return the bytes that :func:`compact` has spared."""
    return values.nbytes - values.itemsize if values.size and values.strides == (0,) else 0
