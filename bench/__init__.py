"""Benchmarks: `./run bench [NAME...]` prints one JSON line a figure. See `bench/__main__.py`."""
