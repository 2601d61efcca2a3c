"""`kafkalog local`, `broker` and `zookeeper`: commands that run servers, which they load when they are called."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click

from kafkalog.cli.command import Command, pairs
from kafkalog.cli.output import counted
from kafkalog.errors import AddressInUse, StorageFailed, ZooKeeperUnreachable

_LOOK_SECONDS = 0.5
_APART = 100
_PORT_MAX = 65535
_folder = click.Path(file_okay=False, path_type=Path)


@contextmanager
def _naming_the_option(port: int) -> Iterator[None]:
    """Name `--port` in the error of a port in use, not the setting by which the server gets it, and another port."""
    try:
        yield
    except AddressInUse as error:
        named = error.fresh(setting="--port")
        other = port + _APART if port + 2 * _APART <= _PORT_MAX else port - _APART
        named.add_note(f"to use other ports, give for instance `--port {other}`")
        raise named from None


@click.command(
    cls=Command,
    examples=[
        ("One broker; its data is deleted at the end", "kafkalog local"),
        ("Three brokers, and their data is kept", "kafkalog local --brokers 3 --data data"),
        (
            "Three brokers, one copy of each partition",
            "kafkalog local --brokers 3 --config default.replication.factor=1",
        ),
    ],
)
@click.option("--brokers", type=click.IntRange(1, 100), default=1, show_default=True, help="Number of brokers.")
@click.option("--data", type=_folder, help="Keep all data in this directory; otherwise it is deleted at the end.")
@click.option("--port", type=click.IntRange(1, _PORT_MAX), default=9192, show_default=True,
              help="Broker i serves gRPC at PORT+2i and data at PORT+2i+1.")  # fmt: skip
@click.option("--config", multiple=True, metavar="NAME=VALUE", callback=pairs,
              help="A setting of the brokers; repeatable. With three brokers or more, default.replication.factor is 3 "
              "and default.min.insync.replicas 2 unless given.")  # fmt: skip
@click.option("--no-restart", is_flag=True, help="Do not restart a broker or ZooKeeper that ended on its own.")
def local(brokers: int, data: Path | None, port: int, config: dict[str, str], no_restart: bool) -> None:
    """Run a cluster on this machine: a real ZooKeeper and brokers, until Ctrl-C.

    Prints on stderr the warnings and errors that the brokers log, and says there when a server has ended.
    """
    from broker.local import LocalCluster
    from broker.local.supervisor import Supervisor
    from broker.signals import StopRequest

    last = port + 2 * brokers - 1
    if last > _PORT_MAX:
        sentence = f"{counted(brokers, 'broker')} would use the ports {port} to {last}, and the highest is {_PORT_MAX}"
        raise click.BadParameter(sentence, param_hint="--port")
    with (
        _naming_the_option(port),
        LocalCluster(brokers=brokers, data=data, port=port, settings=config) as cluster,
        StopRequest() as stop,  # before it is said that the cluster serves
    ):
        click.echo(f"bootstrap servers: {cluster.bootstrap_servers}")
        click.echo(f"ZooKeeper: {cluster.zookeeper_connect}")
        click.echo(f"data: {data.resolve() if data else 'gone when this ends; keep it with --data DIR'}")
        click.echo("Ctrl-C stops it")
        sys.stdout.flush()
        supervisor = Supervisor(cluster, lambda sentence: click.echo(sentence, err=True), restart=not no_restart)
        while not stop.wait(_LOOK_SECONDS):
            supervisor.look()
        cluster.close()  # inside the handler: a second Ctrl-C does not interrupt it


@click.command(
    cls=Command,
    examples=[
        ("With the settings of a file", "kafkalog broker --config conf/broker.properties"),
    ],
)
@click.option("--config", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=True,
              help="A file of name=value lines; conf/broker.properties lists all settings.")  # fmt: skip
def broker(config: Path) -> None:
    """Run one broker in the foreground, with a ZooKeeper that already runs.

    Exit code 74: the data directory failed during the start; check the disk before you start the broker again.
    Exit code 75: the disk did not answer for disk.stall.timeout.ms; the broker may be started again, as after a kill.
    """
    from broker.server import read_config, run

    try:
        run(read_config(config))
    except StorageFailed as error:
        click.echo(f"kafkalog: {error}", err=True)
        raise click.exceptions.Exit(os.EX_IOERR) from None


@click.command(
    cls=Command,
    examples=[
        ("For tests; its data is deleted at the end", "kafkalog zookeeper"),
        ("For brokers on other machines", "kafkalog zookeeper --host 0.0.0.0 --data data/zookeeper"),
    ],
)
@click.option("--port", type=click.IntRange(1, _PORT_MAX), default=2181, show_default=True)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--data", type=_folder, help="Keep the data in this directory; otherwise it is deleted at the end.")
def zookeeper(port: int, host: str, data: Path | None) -> None:
    """Run the embedded ZooKeeper in the foreground, until Ctrl-C."""
    from broker.local.zookeeper import EmbeddedZooKeeper
    from broker.signals import StopRequest

    with _naming_the_option(port), ExitStack() as stack:
        directory, keep_fds = data, []
        if directory is None:
            directory, keep_fd = stack.enter_context(_temporary_folder())
            keep_fds.append(keep_fd)
        stop = stack.enter_context(StopRequest())
        server = EmbeddedZooKeeper(directory, port=port, host=host, durable=data is not None, pass_fds=keep_fds)
        server.start()
        stack.callback(server.stop)
        server.wait_ready(stop.wait)
        click.echo(f"ZooKeeper: {server.connect}")
        sys.stdout.flush()
        while not stop.wait(1.0):
            if not server.serves():
                raise ZooKeeperUnreachable(address=server.connect, reason=f"it ended; see {server.log_file}")


@contextmanager
def _temporary_folder() -> Iterator[tuple[Path, int]]:
    """A folder that is removed after this process and all others that inherit the descriptor have ended, killed or
    not."""
    from broker.local.sweeper import swept_folder

    folder, sweeper, keep_fd = swept_folder("kafkalog-zookeeper-")
    try:
        yield folder, keep_fd
    finally:
        os.close(keep_fd)
        sweeper.wait()
