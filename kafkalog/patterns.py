"""Regular expressions that match the names of topics. Brokers match what clients send, so the time is linear in the
length: by RE2, which has no look-around and no back-references. One that backtracks could hold a broker for ever."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import re2

from kafkalog.errors import InvalidArgument

SYNTAX = "https://github.com/google/re2/wiki/Syntax"


_PROGRAM_BYTES_MAX = 1 << 20
"""Of a compiled pattern and its states: brokers keep those that were used last."""


@lru_cache(maxsize=100)
def matcher(pattern: str) -> Callable[[str], object]:
    """A function that says whether a whole name matches. Raises InvalidArgument: the pattern is none of RE2's."""
    options = re2.Options()
    options.log_errors = False
    options.max_mem = _PROGRAM_BYTES_MAX
    try:
        matches: Callable[[str], object] = re2.compile(pattern, options).fullmatch
    except re2.error as error:
        reason = error.args[0].decode(errors="replace")
        raise InvalidArgument(
            reason=f"'{pattern[:100]}' is not a regular expression as RE2 knows them ({SYNTAX}): {reason}"
        ) from None
    return matches
