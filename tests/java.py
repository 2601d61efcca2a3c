"""How the tests start Java."""

QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""For a Java that lives some minutes at most: the ten lines of README took 30 s instead of 38 s (means of four runs of
each, by turns, on two busy cores)."""
