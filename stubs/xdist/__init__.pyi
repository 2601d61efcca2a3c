"""What the tests use of pytest-xdist, which has no types of its own."""
