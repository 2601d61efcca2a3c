# What the project uses of kazoo, which says nothing of its types.
