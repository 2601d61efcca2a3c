"""Commands of `kafkalog` that run servers or read their files, as entry points of the group `kafkalog.commands`.

`kafkalog --help` imports these modules, so that they import click and nothing heavier at the top.
"""
