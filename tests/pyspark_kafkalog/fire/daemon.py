"""Spark's daemon, from which it forks its Python workers, with what they all import imported before: under fire few of
them live long enough to be worth it."""

from __future__ import annotations

import pandas  # noqa: F401
import pyarrow  # noqa: F401
import pyspark.sql.pandas.serializers  # noqa: F401
from pyspark.daemon import manager

if __name__ == "__main__":
    manager()
