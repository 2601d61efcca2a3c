"""A simulated machine: a disk, and on it runs of a broker, made of the broker's real parts as in `broker/server.py`, up
to the ports. `serve` is what stands in their place.

A kill leaves the files; a loss of power any part of what was not synced; a wiped disk nothing.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from broker.config import BrokerSettings
from broker.controller.controller import Controller
from broker.replica.fetcher import ReplicaFetcher
from broker.replica.host import Host
from broker.replica.insync import InSyncSets
from broker.replica.jobs import StagedJobs
from broker.replica.metadata import Metadata
from broker.replica.partition import Partition
from broker.replica.registration import Registration
from broker.replica.repair import repair
from broker.replica.undone import Undone
from broker.replica.watcher import Watcher
from broker.requests import append as appends
from broker.requests import fetch as fetches
from broker.requests import offsets, staging, waits
from broker.requests.replicate import ReplicaSession
from broker.storage.log_dir import LogDirectory
from kafkalog.errors import BrokerUnreachable, KafkalogError, RequestTimedOut, ZooKeeperUnreachable
from kafkalog.retry import Backoff
from kafkalog.wire import broker_pb2 as bpb
from kafkalog.wire import dataport_pb2 as pb
from kafkalog.wire import transactions_pb2 as tpb
from kafkalog.zk.cluster import join_cluster
from kafkalog.zk.registry import BrokerRecord
from kafkalog.zk.session import ZooKeeperSession
from tests.crash.memory_disk import MemoryDisk
from tests.simulation.network import Connection
from tests.simulation.scheduler import Event, Killed, Process, Scheduler

if TYPE_CHECKING:
    from tests.simulation.world import World

_PATH = Path("/data")
_SILENCE_SECONDS = 10.0
_HANDOVER_SECONDS = 3.0
_TURN_SECONDS = 3.0
_REPAIR_SECONDS = 1.0


class Drive(MemoryDisk):
    """A machine's disk. A sync takes time; at a step that is counted down to the machine stops."""

    def __init__(self, scheduler: Scheduler, name: str) -> None:
        super().__init__()
        self.scheduler = scheduler
        self.name = name
        self.boot = f"{name}-boot"
        self.steps_left = 0
        self.on_step: Callable[[], object] = lambda: None

    def _step(self, name: str) -> None:
        if self.steps_left:
            self.steps_left -= 1
            if not self.steps_left:
                self.on_step()
                raise Killed

    def sync(self, fd: int) -> None:
        super().sync(fd)
        fiber = self.scheduler.current
        if fiber is not None and not fiber.process.is_dead:
            self.scheduler.sleep(0.0001 + fiber.chance.expovariate(1000.0))

    def identity(self, fd: int) -> str:
        return f"{self.boot}:{self.name}"

    def image(self, disk: MemoryDisk) -> Drive:
        """The same drive with what another disk has."""
        left = Drive(self.scheduler, self.name)
        left.root, left.boot = disk.root, disk.boot
        return left


class Answered(NamedTuple):
    """An answer of `fetch`."""

    reply: pb.FetchReply
    body: bytes


class Machine:
    """A machine with a broker.

    Attributes:
        may_have_lost: it has lost power or its disk, and has not started since.
        is_wanted: it is to run: a broker that ends by an error is started again.
        slow_until: until when the threads that wait for acks are slow.
    """

    def __init__(self, world: World, number: int, settings: BrokerSettings) -> None:
        self.world = world
        self.number = number
        self.name = f"b{number}"
        self.settings = settings
        self.chance = random.Random(f"{world.scheduler.seed} {self.name}")
        self.disk = Drive(world.scheduler, self.name)
        self.process: Process | None = None
        self.host: Host | None = None
        self.is_serving = False
        self.is_wanted = True
        self.may_have_lost = False
        self._in_repair: set[Partition] = set()
        self.slow_until = 0.0
        self._stop: Callable[[], object] = lambda: None

    # --- runs --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        if self.process is None:
            self.is_wanted = True
            self.process = self.world.scheduler.process(self.name)
            self.disk.steps_left = 0
            self.disk.on_step = self._stopped_at_step
            self.world.scheduler.spawn(self.process, "main", self._main)

    def kill(self) -> None:
        """End the process. The files stay."""
        if self.process is not None:
            self._end(self.disk.image(self.disk.after_kill()))

    def lose_power(self, keep: float) -> None:
        left = self.disk.image(self.disk.after_power_cut(self.chance, keep))
        self.may_have_lost = True
        self._end(left)

    def lose_disk(self) -> None:
        left = Drive(self.world.scheduler, self.name)
        left.boot = self.disk.boot
        self.may_have_lost = True
        self._end(left)

    def stop(self) -> None:
        """Stop the broker in order. Its process ends a little later."""
        if self.process is not None and self.is_serving:
            self.is_wanted = False
            self.world.scheduler.spawn(self.process, "stop", self._stop_and_end)

    def _stop_and_end(self) -> None:
        self._stop()
        process = self.process
        self.world.scheduler.after(0.0, lambda: self.process is process and self.kill(), f"{self.name}/end")
        self.world.scheduler.sleep(60.0)

    def _stopped_at_step(self) -> None:
        """By a fiber of the broker, before a step of the disk."""
        process, left = self.process, self.disk.image(self.disk.after_kill())
        assert process is not None
        process.is_dead = True
        self.world.scheduler.after(0.0, lambda: self._end(left), f"{self.name}/stopped at a step")

    def _end(self, left: Drive) -> None:
        process, self.process, self.host, self.is_serving = self.process, None, None, False
        self.disk = left
        if process is not None:
            self.world.scheduler.kill(process)
            self.world.zookeeper.drop(process)
            self.world.network.drop(process)

    def _main(self) -> None:
        try:
            self._run()
        except KafkalogError as error:  # a supervisor starts it again
            self.world.note(f"{self.name} did not start: {error}")
            process = self.process
            scheduler = self.world.scheduler
            scheduler.after(0.0, lambda: self.process is process and self.kill(), f"{self.name}/failed")
            scheduler.after(1.0, lambda: self.is_wanted and self.start(), f"{self.name}/again")
            scheduler.sleep(60.0)

    def _run(self) -> None:
        settings, clock = self.settings, self.world.scheduler.clock
        session = ZooKeeperSession("zk:2181", session_timeout_ms=settings.zookeeper_session_timeout_ms)
        directory = LogDirectory(
            _PATH, disk=self.disk, clock=clock, check_interval_ms=settings.log_retention_check_interval_ms
        )
        session.start()
        with session.patient():
            cluster_id = join_cluster(session, clock.now_us()).cluster_id
        directory.check_owner(cluster_id, self.number)
        record = BrokerRecord(
            self.number, self.name, 1, 2, directory=directory.directory_id, lock=directory.lock_id, where=self.name
        )
        metadata = Metadata(session, clock, settings.zookeeper_session_timeout_ms / 1000)
        registration = Registration(record, metadata, directory.services.health, settings, clock)
        registration.check_id()
        directory.claim(cluster_id, self.number)
        undone = Undone(clock)
        host = Host(self.number, directory, metadata, settings, undone, clock)
        host.losses.raise_epoch = registration.raise_epoch
        host.on_damage = self._met_damage
        host.links.new_link = lambda fetcher: SimulatedLink(self, fetcher, metadata)
        watcher = Watcher(metadata, host, registration, undone, clock)
        directory.on_lost = watcher.log_removed
        directory.on_failed = lambda error: self.world.anomaly("directory-failed", f"{self.name}: {error}")
        directory.start()
        with session.patient():
            watcher.start()
        insync = InSyncSets(host, clock)
        insync.start()
        self.host, self.is_serving = host, True
        registration.register()
        controller = Controller(self.number, metadata, registration, settings, clock)
        controller.start()
        self.may_have_lost = False

        def stop() -> None:
            with suppress(ZooKeeperUnreachable):
                if registration.leads_for_others:
                    registration.announce_stop()
                    registration.wait_without_leaderships(_HANDOVER_SECONDS)
            controller.stop()
            self.is_serving = False
            insync.stop()
            watcher.stop()
            host.close()
            session.close()
            directory.close()

        self._stop = stop

    def _met_damage(self, partition: Partition, offset: int) -> None:
        """As `broker/replica/scrubber.py:Scrubber.met_damage`."""
        process = self.process
        if process is not None and partition not in self._in_repair:
            self._in_repair.add(partition)
            self.world.scheduler.spawn(process, f"repair-{partition.label}", lambda: self._repair(partition))

    def _repair(self, partition: Partition) -> None:
        others = [_Replica(each, partition) for each in self.world.machines if each is not self]
        while partition.is_open and not partition.following.is_whole:
            self.world.scheduler.sleep(_REPAIR_SECONDS)
            with suppress(KafkalogError):
                partition.log.roll_if_damaged()
                for segment in partition.log.view.segments[:-1]:
                    if segment.damaged:
                        repair(partition.log, segment, others, lambda: not partition.is_open)
        self._in_repair.discard(partition)

    # --- what it serves ----------------------------------------------------------------------------------------------

    def serve(self, connection: Connection) -> None:
        """Answer a client's requests, one after the other."""
        host = self.host
        while not connection.is_over or connection.requests:
            request = connection.next_request()
            if request is not None and host is not None:
                try:
                    connection.answer(self._answer(host, request))
                except KafkalogError as error:
                    connection.answer(error.fresh())

    def _answer(self, host: Host, request: Any) -> Any:
        """Raises KafkalogError."""
        if isinstance(request, pb.RequestHeader):
            return self._fetch(host, request.fetch)
        if isinstance(request, tuple) and isinstance(request[0], pb.AppendRequest):
            return self._append(host, *request)
        if isinstance(request, tuple):
            return self._stage(host, *request)
        jobs = StagedJobs(host.broker_id)  # for what is large, as nothing is here
        if isinstance(request, tpb.PrepareRequest):
            return staging.prepare(request, host, jobs, _TURN_SECONDS)
        if isinstance(request, tpb.ApplyRequest):
            return staging.apply(request, host, jobs, _TURN_SECONDS)
        if isinstance(request, bpb.DeleteRecordsRequest):
            return offsets.delete_records(request, host)
        return staging.forget(request, host)

    def _stage(self, host: Host, request: pb.StageRequest, body: bytes) -> pb.StageReply:
        call = staging.StageCall(request, memoryview(bytearray(body)), host)
        reply = call.write()
        clock = self.world.scheduler.clock
        deadline = clock.monotonic() + call.timeout_ms / 1000
        if not waits.wait_for(call.waiting_at(), call.is_acked, deadline, clock):
            call.give_up()
        return reply

    def _append(self, host: Host, request: pb.AppendRequest, body: bytes) -> pb.AppendReply:
        call = appends.Call(request, memoryview(bytearray(body)))
        appends.append([call], host)
        clock = self.world.scheduler.clock
        deadline = clock.monotonic() + call.timeout_ms / 1000
        if call.waits_for:
            if self.slow_until > clock.monotonic():  # the connection's thread
                self.world.scheduler.sleep(self.chance.random() * 4.0)
            waits.wait_for(call.waiting_at(), call.is_acked, deadline, clock)
        return appends.ack_reply(call)

    @staticmethod
    def _fetch(host: Host, request: pb.FetchRequest) -> Answered:
        """Raises KafkalogError."""
        answer = fetches.fetch(request, host, 1 << 20)
        try:
            return Answered(answer.reply, b"".join(piece.read() for piece in answer.slices))
        finally:
            answer.close()

    def serve_replica(self, connection: Connection) -> None:
        """Answer the fetches of a follower's broker, as `broker/transport/connection.py`."""
        host, clock = self.host, self.world.scheduler.clock
        if host is None:
            return
        session = ReplicaSession(host, clock, connection.number, connection.has_requests.set)
        pending: deque[tuple[pb.ReplicaFetchRequest, float]] = deque()
        is_taken = False
        try:
            while not connection.is_over or connection.requests or pending:
                while connection.requests:
                    request = pb.ReplicaFetchRequest.FromString(connection.requests.popleft())
                    pending.append((request, clock.monotonic() + request.max_wait_ms / 1000))
                if pending:
                    request, deadline = pending[0]
                    if not is_taken:
                        session.take(request)
                        is_taken = True
                    is_urgent = len(pending) > 1 or connection.is_over or clock.monotonic() >= deadline
                    answer = session.answer(request.max_bytes, is_urgent)
                    if answer is not None:
                        reply = answer.reply.SerializeToString()
                        body = b"".join(piece.read() for piece in answer.slices)
                        answer.close()
                        connection.answer((reply, body))
                        pending.popleft()
                        is_taken = False
                        continue
                connection.has_requests.clear()
                if not connection.requests and not connection.is_over:
                    connection.has_requests.wait(pending[0][1] - clock.monotonic() if pending else None)
        finally:
            session.close()


class _Replica:
    """A replica on another machine, for repairs."""

    def __init__(self, machine: Machine, partition: Partition) -> None:
        self.name = machine.name
        self._machine = machine
        self._partition = partition

    def read(self, offset: int, max_bytes: int) -> memoryview:
        host, partition = self._machine.host, self._partition
        if host is None:
            raise BrokerUnreachable(address=self.name, reason="it is down")
        replica = host.replica_of(partition.topic_id, partition.number)
        with replica.read_as_replica(offset, max_bytes, None) as piece:
            return memoryview(piece.read())


class SimulatedLink:
    """As the `_Link` of `broker/replica/follower.py`, by the simulated network."""

    def __init__(self, machine: Machine, fetcher: ReplicaFetcher, metadata: Metadata) -> None:
        self._machine = machine
        self._world = machine.world
        self._fetcher = fetcher
        self._metadata = metadata
        self._woken = Event(self._world.scheduler)
        self._stopping = False

    def start(self) -> None:
        assert self._machine.process is not None
        name = f"link-{self._fetcher.leader_id}"
        self._fiber = self._world.scheduler.spawn(self._machine.process, name, self._run)

    def wake(self) -> None:
        self._woken.set()

    def stop(self) -> None:
        self._stopping = True
        self.wake()

    def join(self) -> None:
        self._fiber.join()

    def _run(self) -> None:
        backoff = Backoff(0.05, 1.0)
        while not self._stopping:
            if not self._fetcher.has_replicas:
                self._woken.clear()
                self._woken.wait()
                continue
            connection = None
            try:
                connection = self._connect()
                backoff.reset()
                self._exchange(connection)
            except KafkalogError as error:
                self._world.note(f"{self._machine.name} link to {self._fetcher.leader_id}: {error}")
            finally:
                if connection is not None:
                    connection.cut()
            if not self._stopping:
                self._woken.clear()
                self._world.scheduler.sleep(backoff.next())

    def _connect(self) -> Connection:
        leader_id = self._fetcher.leader_id
        if self._metadata.brokers.get(leader_id) is None:
            raise BrokerUnreachable(address=f"broker {leader_id}", reason="it is not registered")
        leader = self._world.machines[leader_id]
        assert self._machine.process is not None
        connection = self._world.connect(self._machine.process, leader, leader.serve_replica)
        self._fetcher.connected()
        return connection

    def _exchange(self, connection: Connection) -> None:
        clock = self._world.scheduler.clock
        connection.has_news = self._woken
        heard_at = clock.monotonic()
        while not self._stopping:
            self._woken.clear()
            request, wait = self._fetcher.next_request()
            if request is not None:
                connection.send(request.SerializeToString())
            if not connection.answers and connection.is_up:
                self._woken.wait(_SILENCE_SECONDS if wait is None else wait)
            if connection.answers or not connection.is_up:
                reply, body = connection.receive(0.0)
                header = pb.ReplyHeader(replica_fetch=pb.ReplicaFetchReply.FromString(reply))
                self._fetcher.take(header, memoryview(bytearray(body)))
                heard_at = clock.monotonic()
            elif clock.monotonic() >= heard_at + _SILENCE_SECONDS:
                raise RequestTimedOut(what="a replica fetch", address=connection.target.name, timeout_ms=10_000)
