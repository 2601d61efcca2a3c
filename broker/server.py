"""One broker: the order in which its parts start and stop. Knows the parts, not what they do.

Start: settings, ports (a port in use is the commonest mistake and costs nothing to find), the data directory's lock,
ZooKeeper, the check of the broker's id, the logs, the threads that work beside requests, the data port, gRPC, the
broker registry, the controller. Stop, in reverse order, completing accepted requests: other replicas take over the
partitions that are led here, the controller resigns, gRPC, the data port, those threads, ZooKeeper (the end of the
session removes the broker from the registry), then every log is flushed and its index saved.
"""

from __future__ import annotations

import gc
import logging
import os
import resource
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from broker.announce import Announcer, announce
from broker.config import BrokerSettings
from broker.controller.controller import Controller
from broker.groups.membership import Groups
from broker.groups.monitor import Monitor
from broker.groups.states import States
from broker.replica.host import Host
from broker.replica.in_doubt import InDoubtRecovery
from broker.replica.insync import InSyncSets
from broker.replica.jobs import StagedJobs
from broker.replica.metadata import Metadata
from broker.replica.registration import Registration
from broker.replica.scrubber import Scrubber
from broker.replica.undone import Undone
from broker.replica.watcher import Watcher
from broker.signals import StopRequest
from broker.storage.log_dir import LogDirectory
from broker.transport import dataport
from broker.transport.dataport import DataPort
from broker.transport.rpc import BrokerService, RpcServer
from kafkalog.clock import SYSTEM_CLOCK, Clock
from kafkalog.config import read_properties
from kafkalog.errors import InvalidSetting, KafkalogError, StorageFailed, ZooKeeperUnreachable
from kafkalog.events import get_logger, log_to_stderr
from kafkalog.net.tcp import plain_reason
from kafkalog.versions import FORMATS
from kafkalog.zk.cluster import join_cluster, read_cluster
from kafkalog.zk.registry import BrokerRecord
from kafkalog.zk.session import ZooKeeperSession

log = get_logger(__name__)

_GRACE_SECONDS = 10.0
_HANDOVER_SECONDS = 10.0


def _check_resolves(host: str) -> None:
    """Warn of an advertised name that is unknown here: clients elsewhere may know it, but seldom do."""
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError) as error:
        log.warning("advertised_host_unknown", host=host, reason=plain_reason(error))


def version() -> str:
    """The installed version of this project; empty in a checkout that was never installed."""
    try:
        return metadata.version("pyspark-kafkalog")
    except metadata.PackageNotFoundError:
        return ""


class Broker:
    """A broker in this process. `start` once, `stop` once.

    Args:
        settings: of `BrokerSettings`.
        on_disk_stalled: called with the error when a call to the disk does not return; None: the directory is out of
            service from then on, for the process may have other work.

    Attributes:
        host: its partitions; set by `start`, like those below.
        grpc_port, data_port: the ports in use, also if a free port was requested.
        on_replaced: called when another broker has this one's id. This one serves nothing any more, and is to be
            stopped.
    """

    host: Host
    watcher: Watcher
    registration: Registration
    rpc_service: BrokerService
    in_doubt: InDoubtRecovery
    scrubber: Scrubber

    def __init__(
        self,
        settings: BrokerSettings,
        clock: Clock = SYSTEM_CLOCK,
        on_disk_stalled: Callable[[StorageFailed], object] | None = None,
    ) -> None:
        self.settings = settings
        self._clock = clock
        self._on_disk_stalled = on_disk_stalled
        self._undo: list[Callable[[], object]] = []  # how to stop what was started, in the order of starting
        self._clean = True
        self._started = False
        self.on_replaced: Callable[[], object] = lambda: None
        self.grpc_port = 0
        self.data_port = 0

    def start(self) -> None:
        """Start everything; what was started is stopped again if a later part fails.

        Raises:
            AddressInUse, DataDirInUse, ClusterMismatch, ZooKeeperUnreachable, StorageFailed, InvalidSetting.
            FormatLevelNotUnderstood: the cluster was upgraded beyond this version.
        """
        try:
            self._start()
        except BaseException:
            self.stop(clean=False)
            raise

    def _start(self) -> None:
        settings = self.settings
        if settings.grpc_port and settings.grpc_port == settings.data_port:
            reason = "it is also grpc.port; a broker needs two ports"
            raise InvalidSetting(name="data.port", value=settings.data_port, reason=reason)
        rpc = RpcServer(settings.host, settings.grpc_port, settings.broker_id)
        self._undo.append(lambda: rpc.stop(self._grace_seconds))
        listeners = dataport.listen(settings)
        self._undo.append(lambda: dataport.close_all(listeners))
        self.grpc_port, self.data_port = rpc.port, listeners[0].getsockname()[1]

        session = ZooKeeperSession(
            settings.zookeeper_connect,
            session_timeout_ms=settings.zookeeper_session_timeout_ms,
            connection_timeout_ms=settings.zookeeper_connection_timeout_ms,
        )
        directory = LogDirectory(
            Path(settings.log_dir),
            clock=self._clock,
            producer_batches_remembered=settings.producer_batches_remembered,
            producer_state_max=settings.producer_state_max,
            producer_expiration_ms=settings.producer_id_expiration_ms,
            check_interval_ms=settings.log_retention_check_interval_ms,
            stall_timeout_ms=settings.disk_stall_timeout_ms,
            on_stalled=self._on_disk_stalled,
        )
        self._undo.append(lambda: directory.close(clean=self._clean))
        session.start()
        self._undo.append(session.close)
        with session.patient():
            found = read_cluster(session)
            # Before a cluster is made: with a mistyped chroot, a broker that has logs would leave a second one behind.
            directory.check_owner(None if found is None else found.cluster_id, settings.broker_id)
            cluster = join_cluster(session, self._clock.now_us())
        cluster.check_understood(settings.broker_id, FORMATS)
        cluster_id = cluster.cluster_id

        address = settings.advertised_host or settings.host
        _check_resolves(address)
        record = BrokerRecord(
            broker_id=settings.broker_id,
            host=address,
            grpc_port=self.grpc_port,
            data_port=self.data_port,
            rack=settings.rack or "",
            version=version(),
            directory=directory.directory_id,
            lock=directory.lock_id,
            where=f"{socket.gethostname()}:{directory.path}",
        )
        metadata = Metadata(session, self._clock, settings.zookeeper_session_timeout_ms / 1000)
        health = directory.services.health
        registration = self.registration = Registration(record, metadata, health, settings, self._clock)
        registration.check_id()
        directory.claim(cluster_id, settings.broker_id)  # not before: it gives a new directory this id for good
        undone = Undone(self._clock)
        host = self.host = Host(settings.broker_id, directory, metadata, settings, undone, self._clock)
        host.losses.raise_epoch = registration.raise_epoch
        watcher = self.watcher = Watcher(metadata, host, registration, undone, self._clock)
        watcher.on_taken = self._was_replaced
        directory.on_lost = watcher.log_removed
        directory.on_failed = lambda error: self._take_out_of_service(error, rpc)
        self._undo.append(host.close)
        self._undo.append(watcher.stop)
        directory.start()  # first: what the host finds deleted is unlinked beside everything else
        with session.patient():
            watcher.start()
        insync = InSyncSets(host, self._clock)
        self._undo.append(insync.stop)
        insync.start()
        jobs = StagedJobs(settings.broker_id)
        self._undo.append(jobs.stop)
        self.in_doubt = InDoubtRecovery(host, settings, directory.services.steady_clock, jobs)
        self._undo.append(self.in_doubt.stop)
        self.in_doubt.start()

        scrubber = self.scrubber = Scrubber(host, directory, self._clock)
        self._undo.append(scrubber.stop)
        scrubber.start()

        groups = Groups(States(session), metadata, self._clock)
        monitor = Monitor(settings.broker_id, metadata, groups, self._clock)
        self._undo.append(monitor.stop)
        monitor.start()

        data = DataPort(listeners, host, settings, self._clock)
        self._undo.append(lambda: data.stop(self._grace_seconds))
        data.start()
        self.rpc_service = BrokerService(
            host, settings, self._clock, cluster_id, version(), data.counters, jobs, groups, scrubber
        )
        rpc.start(self.rpc_service)
        self._undo.append(lambda: rpc.stop(self._grace_seconds))
        registration.register()
        controller = Controller(settings.broker_id, metadata, registration, settings, self._clock)
        self._undo.append(controller.stop)
        controller.start()
        self._undo.append(self._hand_over)
        self._started = True
        log.info(
            "broker_started",
            broker_id=settings.broker_id,
            grpc=f"{settings.host}:{self.grpc_port}",
            data=f"{settings.host}:{self.data_port}",
            log_dir=settings.log_dir,
            partitions=len(host.hosted),
            cluster_id=cluster_id,
        )

    @property
    def _grace_seconds(self) -> float:
        """How long a stop waits for requests that were accepted: after a crash nobody would answer them."""
        return _GRACE_SECONDS if self._clean else 0.0

    def _hand_over(self) -> None:
        """Let other replicas lead, while everything still runs: they have to be in sync for it."""
        if not self._clean or not self.registration.leads_for_others:
            return
        try:
            self.registration.announce_stop()
        except ZooKeeperUnreachable as error:
            log.warning("leaderships_not_handed_over", broker_id=self.settings.broker_id, reason=str(error))
            return
        if not self.registration.wait_without_leaderships(_HANDOVER_SECONDS):
            reason = f"others did not take over within {_HANDOVER_SECONDS:g} s"
            log.warning("leaderships_not_handed_over", broker_id=self.settings.broker_id, reason=reason)

    def _take_out_of_service(self, error: StorageFailed, rpc: RpcServer) -> None:
        """The data directory failed. The process stays, to report the reason. It must not restart on its own: the page
        cache may hold data that the disk has lost, and a start would trust it."""
        rpc.tell_unhealthy()
        self.registration.withdraw()
        log.error("broker_out_of_service", broker_id=self.settings.broker_id, reason=str(error))

    def _was_replaced(self) -> None:
        """Another broker has this one's id. If the directory has failed, the process stays, to report the reason."""
        log.error("broker_replaced", broker_id=self.settings.broker_id, reason=str(self.registration.taken))
        if self.host.failed is None:
            self.on_replaced()

    def stop(self, clean: bool = True) -> None:
        """Stop everything that was started, last first. One part's failure does not keep the others from stopping."""
        self._clean = clean
        while self._undo:
            undo = self._undo.pop()
            try:
                undo()
            except Exception:
                log.exception("stop_failed")
        if self._started:
            log.info("broker_stopped", broker_id=self.settings.broker_id, clean=clean)


def read_config(path: Path, overrides: Mapping[str, Any] | None = None) -> BrokerSettings:
    """The broker's settings from a `name=value` file. Raises InvalidSetting, UnknownSetting."""
    try:
        text = path.read_text("utf-8-sig")  # with or without a byte order mark
    except OSError as error:
        raise InvalidSetting(name="config file", value=str(path), reason=error.strerror or str(error)) from None
    except UnicodeDecodeError:
        raise InvalidSetting(name="config file", value=str(path), reason="it is not a text file") from None
    return BrokerSettings.parse(read_properties(text, str(path)) | dict(overrides or {}))


def run(settings: BrokerSettings, announces: bool = False) -> None:
    """Run a broker until SIGTERM, SIGINT or, with `exit.with.stdin`, the end of standard input; then stop it in order.
    If its disk hangs (`disk.stall.timeout.ms`), the process ends at once, with exit code 75.

    Args:
        announces: print a line of JSON on standard output once it serves (its ports and pid), or the error that kept
            it from starting; and one for what is logged as warning or error (`broker/announce.py`).

    Raises:
        KafkalogError: it did not start; `start` says which.
        InvalidSetting: another broker has its id, since it was cut off from ZooKeeper.
    """
    log_to_stderr(settings.log_level)
    if announces:
        logging.getLogger().addHandler(Announcer(sys.stdout.fileno()))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each partition and each connection takes one or two
    with StopRequest() as stop:
        if settings.exit_with_stdin:
            threading.Thread(target=_wait_for_end_of_stdin, args=(stop,), name="stdin", daemon=True).start()
        broker = Broker(settings, on_disk_stalled=_end_process)
        broker.on_replaced = stop.ask
        try:
            broker.start()
            # These objects live as long as the process, and requests leave no cycles: with the default thresholds the
            # search for cycles takes a fifth of an append.
            gc.freeze()
            sys.setswitchinterval(0.02)
            gc.set_threshold(50_000, 20, 100)
        except KafkalogError as error:
            if announces:
                code, facts = error.to_wire()
                announce(sys.stdout.fileno(), {"error": code, "facts": facts})
            raise
        try:
            if announces:
                ports = {"grpc_port": broker.grpc_port, "data_port": broker.data_port, "pid": os.getpid()}
                announce(sys.stdout.fileno(), ports)
            stop.wait()
        finally:
            broker.stop()
        if broker.registration.taken is not None:
            raise broker.registration.taken


def _end_process(error: StorageFailed) -> None:
    """End the process, whatever its threads wait for. A broker that stays would lead its partitions and answer nothing;
    a killed one has lost nothing, and other replicas lead once its session ends."""
    os._exit(os.EX_TEMPFAIL)


def _wait_for_end_of_stdin(stop: StopRequest) -> None:
    try:
        while os.read(sys.stdin.fileno(), 4096):
            pass
    except OSError:
        pass
    stop.ask()
