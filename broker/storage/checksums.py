"""CRC-32C of any range of a file. The time hardly depends on the length of the range. Pure: reads through a function.

If `ab` is `a` followed by `b`, then crc(b) = crc(ab) ^ crc(a) * x^(8 * len(b)): a product of polynomials, modulo the
polynomial of CRC-32C. This is zlib's `crc32_combine`, solved for the second part. So the bytes are read only once, from
an origin up to the furthest end requested, and the checksum from the origin to every 1 KiB is kept.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

from fastcrc.crc32 import iscsi as crc32c

_STEP = 1 << 10
_READ = 1 << 20
assert _READ % _STEP == 0
_POLYNOMIAL = 0x82F63B78  # bit 31 is x^0


class Checksums:
    """The checksums of all ranges that start at or after an origin.

    Args:
        read: (position, length) -> that many bytes; fewer only at the end.
        origin: position of the first byte.
    """

    def __init__(self, read: Callable[[int, int], bytes | memoryview], origin: int) -> None:
        self._read = read
        self._origin = origin
        self._up_to = array("I", [0])  # checksum from the origin to each step

    def of(self, start: int, end: int) -> int | None:
        """CRC-32C of bytes [start, end); None if not all of them exist."""
        assert self._origin <= start <= end
        both, first = self._from_origin(end), self._from_origin(start)
        return None if both is None or first is None else both ^ _shifted(first, end - start)

    def _from_origin(self, end: int) -> int | None:
        steps, rest = divmod(end - self._origin, _STEP)
        while len(self._up_to) <= steps:
            data = memoryview(self._read(self._origin + (len(self._up_to) - 1) * _STEP, _READ))
            if len(data) < _STEP:
                return None
            for at in range(0, len(data) - _STEP + 1, _STEP):
                self._up_to.append(crc32c(data[at : at + _STEP], self._up_to[-1]))
        if not rest:
            return self._up_to[steps]
        data = memoryview(self._read(end - rest, rest))
        return crc32c(data, self._up_to[steps]) if len(data) == rest else None


def _shifted(crc: int, length: int) -> int:
    """crc * x^(8 * length): the contribution of a checksum after `length` more bytes."""
    power = 0
    while length:
        if length & 1:
            crc = _times(_POWERS[power], crc)
        length >>= 1
        power += 1
    return crc


def _times(one: int, other: int) -> int:
    """The product of two polynomials, modulo the polynomial of CRC-32C."""
    product, bit = 0, 1 << 31
    while bit:
        if one & bit:
            product ^= other
        other = (other >> 1) ^ _POLYNOMIAL if other & 1 else other >> 1
        bit >>= 1
    return product


_POWERS = [1 << 23]
"""x^8, x^16, x^32 ...: the shifts by 1, 2, 4 ... bytes."""
for _ in range(62):
    _POWERS.append(_times(_POWERS[-1], _POWERS[-1]))
