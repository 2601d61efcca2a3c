"""`python -m kafkalog.cli`: the command, if no console script is installed."""

from kafkalog.cli.main import main

main()
