"""`python -m kafkalog.cli`: the command, where no console script is installed."""

from kafkalog.cli.main import main

main()
