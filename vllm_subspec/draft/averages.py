"""What live tuning knows: means that forget, and seconds of work by its size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Values = NDArray[np.float64]

MEMORY = 0.97  # weight of what was known, per observation: about the last 30 count
_FIRST_WEIGHT = 0.1  # of the first time that a size is seen: kernels are made, caches are cold
_STALL = 3.0  # times as long as usual: a pause of disk or process, which shall not count in full
_FORGOTTEN = 128  # observations after which a larger size may have become faster


@dataclass
class Average:
    """Exponentially forgetting mean."""

    value: float = 0.0
    weight: float = 0.0

    def add(self, value: float) -> None:
        self.weight = MEMORY * self.weight + 1
        self.value += (value - self.value) / self.weight


@dataclass
class _Bucket:
    size: Average
    seconds: Average
    last: int = 0  # number of the observation


class SecondsBySize:
    """Measured seconds of a kind of work as a function of its size, whatever form that has.

    Sizes within a factor of two share an average. Between the averages it is a straight line.
    Where nothing was measured it is hopeful, so that what may be good is tried, and then known:
    smaller work is in proportion to the smallest that was measured, and larger work goes on along
    the line from the smallest to the largest one.

    Attributes:
        largest: size that was measured; 0 if none was.
    """

    def __init__(self) -> None:
        self.largest = 0
        self._observations = 0
        self._buckets: dict[int, _Bucket] = {}

    @property
    def is_known(self) -> bool:
        """Whether anything was measured."""
        return bool(self._buckets)

    def add(self, size: int, seconds: float) -> None:
        """Work of ``size`` took ``seconds``."""
        bucket = self._bucket(size)
        is_first = not bucket.seconds.weight
        if bucket.seconds.weight > 1:
            seconds = min(seconds, _STALL * bucket.seconds.value)
        bucket.size.add(size)
        bucket.seconds.add(seconds)
        if is_first:
            bucket.seconds.weight = _FIRST_WEIGHT
        self._observations += 1
        bucket.last = self._observations

    def hint(self, size: int, seconds: float) -> None:
        """Similar work of ``size`` took ``seconds``: good until the very work is measured."""
        bucket = self._bucket(size)
        if not bucket.size.weight:
            bucket.size.value, bucket.seconds.value = float(size), seconds

    def fade(self) -> None:
        """Make hints of all measurements: each is replaced when its size is measured next."""
        for bucket in self._buckets.values():
            bucket.size.weight = bucket.seconds.weight = 0.0

    def forget_larger(self, size: int) -> None:
        """Sizes beyond that were not measured for long: hope again.

        One that was slow once is avoided, so that nothing else would tell that it no longer is.
        """
        old = self._observations - _FORGOTTEN
        for key in [k for k, b in self._buckets.items() if b.last <= old]:
            if key > size.bit_length():
                del self._buckets[key]

    def _bucket(self, size: int) -> _Bucket:
        self.largest = max(self.largest, size)
        return self._buckets.setdefault(size.bit_length(), _Bucket(Average(), Average()))

    def at(self, sizes: ArrayLike, floor: float = 0.0) -> Values:
        """Seconds of each of ``sizes``; something must have been measured.

        Args:
            sizes: any shape.
            floor: work of any size takes that long.
        """
        wanted = np.asarray(sizes, dtype=float)
        points = sorted((b.size.value, b.seconds.value) for b in self._buckets.values())
        size, seconds = np.array(points).T
        # Larger work that took less proves a slow smaller one to be an accident.
        seconds = np.minimum.accumulate(seconds[::-1])[::-1]
        between = np.interp(wanted, size, seconds)
        below = seconds[0] * wanted / size[0]
        slope = (seconds[-1] - seconds[0]) / (size[-1] - size[0]) if len(size) > 1 else 0.0
        above = seconds[-1] + slope * (wanted - size[-1])
        values = np.where(wanted < size[0], below, between)
        values = np.where(wanted > size[-1], above, values)
        return np.asarray(np.maximum(floor, values))
