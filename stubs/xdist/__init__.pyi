# What the tests use of pytest-xdist, which says nothing of its types.
