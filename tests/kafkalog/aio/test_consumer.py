"""The consumer for asyncio against a real broker: nothing is lost or doubled, whatever is cancelled and whenever."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import pytest

from broker.local import LocalCluster
from kafkalog import Admin, Message, Producer, TopicPartition, aio
from kafkalog.aio.calls import in_thread
from kafkalog.client.consumer import consumer as threaded
from kafkalog.client.consumer.cursors import Hold
from kafkalog.errors import Closed, InvalidArgument, NotOwner, OffsetOutOfRange, UnknownTopic
from tests.between import amid
from tests.kafkalog.aio.turns import turns_of_others
from tests.kafkalog.client.test_forks import in_child
from tests.proxy import proxied
from tests.waiting import suspend, waited_for

pytestmark = pytest.mark.timeout(180)
GROUP: dict[str, Any] = {"session_timeout_ms": 6000, "heartbeat_interval_ms": 500, "auto_offset_reset": "earliest"}

BY_NAME: dict[str, Any] = {**GROUP, "partition_assignment_strategy": "range"}
"""Of two partitions the first is of the first member, by name, and the second of the second one."""


@pytest.fixture
def admin(cluster: LocalCluster) -> Iterator[Admin]:
    with Admin(cluster.bootstrap_servers) as connected:
        yield connected


@pytest.fixture
def filled(cluster: LocalCluster, admin: Admin, topic: str) -> list[TopicPartition]:
    """Two partitions with records 0 to 4999 each, a hundred a batch."""
    return filled_with(5000, cluster, admin, topic)


def filled_with(
    count: int, cluster: LocalCluster, admin: Admin, topic: str, partitions: int = 2, batch_records: int = 100
) -> list[TopicPartition]:
    admin.create_topic(topic, partitions=partitions)
    fill(cluster, topic, range(count), partitions, batch_records)
    return [TopicPartition(topic, number) for number in range(partitions)]


def fill(cluster: LocalCluster, topic: str, numbers: range, partitions: int = 2, batch_records: int = 100) -> None:
    with Producer(cluster.bootstrap_servers, batch_records=batch_records) as producer:
        for number in numbers:
            for partition in range(partitions):
                producer.send(topic, b"%d" % number, partition=partition)


def check(messages: Sequence[Message], filled: list[TopicPartition], count: int) -> None:
    """They are all records of some partitions, each once, and in order for each partition."""
    found = defaultdict(list)
    for message in messages:
        found[TopicPartition(message.topic, message.partition)].append(int(message.value or b""))
    assert found == {partition: list(range(count)) for partition in filled}


def from_start(filled: list[TopicPartition]) -> dict[TopicPartition, str]:
    return dict.fromkeys(filled, "earliest")


async def until(event: Callable[[], bool], seconds: float = 60) -> None:
    async with asyncio.timeout(seconds):
        while not event():  # noqa: ASYNC110 - it announces itself to nobody
            await asyncio.sleep(0.01)


class Ticker:
    """Counts the turns of a task that takes one after another; `longest` is the longest time for one, in s."""

    def __init__(self) -> None:
        self.ticks = 0
        self.longest = 0.0
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.001)
            self.longest = max(self.longest, time.monotonic() - before)
            self.ticks += 1

    def stop(self) -> None:
        self._task.cancel()


# --- reading


def test_iteration_returns_each_record_in_order(cluster: LocalCluster, filled: list[TopicPartition]) -> None:
    async def main() -> list[Message]:
        found: list[Message] = []
        async with aio.Consumer(cluster.bootstrap_servers) as consumer:
            await consumer.assign(from_start(filled))
            async for message in consumer:
                found.append(message)
                if len(found) == 10_000:
                    break
            assert await consumer.poll(timeout=0.05) is None
        return found

    check(asyncio.run(main()), filled, 5000)


def test_poll_and_consume_and_iteration_take_turns(cluster: LocalCluster, filled: list[TopicPartition]) -> None:
    async def main() -> list[Message]:
        found: list[Message] = []
        async with aio.Consumer(cluster.bootstrap_servers) as consumer:
            await consumer.assign(from_start(filled))
            while len(found) < 10_000:
                for size in (1, 3, 1500, 7):
                    found += await consumer.consume(min(size, 10_000 - len(found)) or 1, timeout=0.05)
                    if len(found) < 10_000 and (message := await consumer.poll(timeout=0.5)) is not None:
                        found.append(message)
                if len(found) < 9_000:
                    found.append(await anext(consumer))
            assert await consumer.consume(5, timeout=0.05) == []
        return found

    check(asyncio.run(main()), filled, 5000)


def test_arrow_batches_take_turns_with_messages(cluster: LocalCluster, filled: list[TopicPartition]) -> None:
    async def main() -> dict[int, list[int]]:
        found = defaultdict(list)
        async with aio.Consumer(cluster.bootstrap_servers) as consumer:
            await consumer.assign(from_start(filled))
            message = await consumer.poll()
            assert message is not None
            found[message.partition].append(message.offset)
            async for batch in consumer.arrow_batches(timeout=30):
                columns = batch.select(["partition", "offset"]).to_pydict()
                found[columns["partition"][0]] += columns["offset"]
                if len(found[0]) + len(found[1]) == 10_000:
                    break
                if len(found[0]) + len(found[1]) < 5000:
                    for message in await consumer.consume(10):
                        found[message.partition].append(message.offset)
        return found

    assert asyncio.run(main()) == {0: list(range(5000)), 1: list(range(5000))}


def test_the_position_is_before_what_is_being_processed(cluster: LocalCluster, filled: list[TopicPartition]) -> None:
    where = filled[0]

    async def main() -> None:
        async with aio.Consumer(cluster.bootstrap_servers, group=where.topic) as consumer:
            await consumer.assign({where: 0})
            for number in range(3):
                await consumer.poll()
                assert await consumer.position(where) == number
            assert len(await consumer.consume(2100)) == 2100
            assert await consumer.position(where) == 3
            await consumer.commit()
            assert await consumer.committed() == {where: 3}
            message = await consumer.poll()
            assert message is not None and message.offset == 2103
            assert await consumer.position(where) == 2103
            await consumer.commit(message)
            assert await consumer.committed([where]) == {where: 2104}
            assert len(await consumer.consume(1500)) == 1500
            message = await anext(consumer)
            assert await consumer.position(where) == message.offset == 3604
            async for batch in consumer.arrow_batches():
                assert batch["offset"][0].as_py() == await consumer.position(where) == 3605
                break

    asyncio.run(main())


def test_what_came_before_a_seek_or_a_pause_is_not_returned_after_it(
    cluster: LocalCluster, filled: list[TopicPartition]
) -> None:
    first, second = filled

    async def main() -> None:
        async with aio.Consumer(cluster.bootstrap_servers) as consumer:
            await consumer.assign(from_start(filled))
            await consumer.consume(50)
            await consumer.seek(first, 4000)
            await consumer.seek(second, 4000)
            assert min(message.offset for message in await consumer.consume(100)) == 4000
            consumer.pause([first])
            assert consumer.paused() == [first]
            found = [*await consumer.consume(900, timeout=30), *await consumer.consume(200, timeout=0.1)]  # and no more
            assert {message.partition for message in found} == {second.partition}
            consumer.resume([first])
            assert {message.partition for message in await consumer.consume(10)} == {first.partition}
            consumer.unassign([second])
            assert consumer.assignment() == [first]

    asyncio.run(main())


@pytest.mark.parametrize("how", ["poll", "consume", "arrow"])
def test_a_wait_that_a_call_left_knows_of_a_seek_and_of_an_assignment(
    cluster: LocalCluster, filled: list[TopicPartition], how: str
) -> None:
    where = filled[0]

    async def main() -> None:
        async def first_offset(seconds: float) -> int | None:
            if how == "poll":
                message = await consumer.poll(seconds)
                return None if message is None else message.offset
            if how == "consume":
                found = await consumer.consume(1, seconds)
                return found[0].offset if found else None
            async for batch in consumer.arrow_batches(seconds):
                return int(batch["offset"][0].as_py())
            return None

        async with aio.Consumer(cluster.bootstrap_servers) as consumer:
            await consumer.assign({where: "latest"})
            assert await first_offset(0.05) is None
            fill(cluster, where.topic, range(1))
            assert consumer._wait is not None
            await until(consumer._wait.found.done)  # record 5000 has come to a call that was left
            assert await consumer.position(where) == 5000
            await consumer.seek(where, 17)
            assert await first_offset(30) == 17
            await consumer.seek(where, "latest")
            assert await first_offset(0.05) is None
            consumer.unassign([where])
            await until(consumer._wait.found.done)
            await consumer.assign({where: 4711})
            assert await first_offset(30) == 4711

    asyncio.run(main())


def test_what_came_to_a_wait_that_a_call_of_another_kind_left_is_returned(
    cluster: LocalCluster, filled: list[TopicPartition]
) -> None:
    where = filled[0]

    async def main() -> None:
        async with aio.Consumer(cluster.bootstrap_servers) as consumer:
            await consumer.assign({where: "latest"})
            assert [batch async for batch in consumer.arrow_batches(0.05)] == []
            fill(cluster, where.topic, range(3))
            assert consumer._wait is not None
            await until(consumer._wait.found.done)
            message = await consumer.poll(30)
            assert message is not None and message.offset == await consumer.position(where) == 5000

    asyncio.run(main())


# --- cancelled calls


async def poll(consumer: aio.Consumer) -> list[Message]:
    message = await consumer.poll()
    assert message is not None
    return [message]


async def following(consumer: aio.Consumer) -> list[Message]:
    return [await anext(consumer)]


async def consume(consumer: aio.Consumer) -> list[Message]:
    return list(await consumer.consume(20))


@pytest.mark.parametrize("ask", [poll, following, consume])
@pytest.mark.parametrize("limit", ["wait_for", "timeout", "cancel"])
def test_cancelled_again_and_again_nothing_is_lost_or_doubled(
    cluster: LocalCluster,
    admin: Admin,
    topic: str,
    ask: Callable[[aio.Consumer], Awaitable[list[Message]]],
    limit: str,
) -> None:
    filled = filled_with(2000, cluster, admin, topic, batch_records=10)
    cancelled = 0

    async def limited(consumer: aio.Consumer, seconds: float) -> list[Message]:
        if limit == "wait_for":
            return await asyncio.wait_for(ask(consumer), seconds)
        if limit == "timeout":
            async with asyncio.timeout(seconds):
                return await ask(consumer)
        task = asyncio.ensure_future(ask(consumer))
        for _ in range(int(seconds * 30_000)):
            await asyncio.sleep(0)
        if not task.cancel():
            return await task
        with suppress(asyncio.CancelledError):
            return await task
        raise TimeoutError

    async def main() -> list[Message]:
        nonlocal cancelled
        found: list[Message] = []
        # Little is fetched at once, so that calls wait often.
        async with aio.Consumer(cluster.bootstrap_servers, max_partition_fetch_bytes=500) as consumer:
            await consumer.assign(from_start(filled))
            number = 0
            while len(found) < 4000:
                number += 1
                try:
                    found += await limited(consumer, number % 7 * 0.0003)
                except TimeoutError:
                    cancelled += 1
        return found

    check(asyncio.run(main()), filled, 2000)
    assert cancelled > 20


def test_a_cancelled_arrow_iterator_continues(cluster: LocalCluster, admin: Admin, topic: str) -> None:
    filled = filled_with(2000, cluster, admin, topic, batch_records=10)

    async def main() -> dict[int, list[int]]:
        found: dict[int, list[int]] = defaultdict(list)
        cancelled = number = 0
        async with aio.Consumer(cluster.bootstrap_servers, max_partition_fetch_bytes=500) as consumer:
            await consumer.assign(from_start(filled))
            batches = consumer.arrow_batches()
            while len(found[0]) + len(found[1]) < 4000:
                number += 1
                try:
                    batch = await asyncio.wait_for(anext(batches), number % 7 * 0.0003)
                except TimeoutError:
                    cancelled += 1
                else:
                    columns = batch.select(["partition", "offset"]).to_pydict()
                    found[columns["partition"][0]] += columns["offset"]
        assert cancelled > 20
        return found

    assert asyncio.run(main()) == {0: list(range(2000)), 1: list(range(2000))}


def test_a_cancelled_consume_counts_nothing_as_processed(cluster: LocalCluster, filled: list[TopicPartition]) -> None:
    async def main() -> None:
        async with aio.Consumer(cluster.bootstrap_servers) as consumer:
            await consumer.assign({filled[0]: 0})
            await consumer.consume(10)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(consumer.consume(100_000), 0.3)
            assert await consumer.position(filled[0]) == 10
            assert [message.offset for message in await consumer.consume(4990)] == list(range(10, 5000))

    asyncio.run(main())


# --- the event loop


def test_the_event_loop_runs_on_while_records_are_read(cluster: LocalCluster, admin: Admin, topic: str) -> None:
    filled = filled_with(20_000, cluster, admin, topic)

    async def main() -> None:
        async with aio.Consumer(cluster.bootstrap_servers) as consumer:
            await consumer.assign(from_start(filled))
            async with turns_of_others() as turns:
                for _ in range(40_000):
                    await anext(consumer)
            assert turns() > 20

    asyncio.run(main())


def test_a_broker_that_hangs_does_not_hold_up_the_event_loop(topic: str) -> None:
    with LocalCluster() as own:
        with Admin(own.bootstrap_servers) as connected:
            [where] = filled_with(10, own, connected, topic, partitions=1)
        pid = own.brokers[0].pid
        assert pid is not None

        async def main() -> None:
            async with aio.Consumer(own.bootstrap_servers, group="slow", request_timeout_ms=3000) as consumer:
                await consumer.assign({where: 0})
                await consumer.consume(10)
                ticker = Ticker()
                suspend(pid)
                try:
                    calls: list[Awaitable[Any]] = [
                        consumer.commit({where: 7}),
                        consumer.committed(),
                        consumer.seek(where, "latest"),
                    ]
                    waiting = [asyncio.ensure_future(each) for each in [*calls, consumer.poll(1)]]
                    await until(lambda: ticker.ticks > 100)
                    assert not any(each.done() for each in waiting[:3])
                finally:
                    os.kill(pid, signal.SIGCONT)
                await asyncio.gather(*waiting)
                ticker.stop()
                assert await consumer.committed() == {where: 7}

        asyncio.run(main())


def test_closing_ends_calls_that_wait(cluster: LocalCluster, admin: Admin, topic: str) -> None:
    filled = filled_with(10, cluster, admin, topic)

    async def main() -> None:
        for ask in ("poll", "consume", "iterate", "arrow"):
            consumer = aio.Consumer(cluster.bootstrap_servers)
            await consumer.assign(dict.fromkeys(filled, "latest" if ask != "consume" else "earliest"))

            async def waiting(consumer: aio.Consumer = consumer, ask: str = ask) -> object:
                if ask == "poll":
                    return await consumer.poll()
                if ask == "consume":
                    return len(await consumer.consume(100))
                return [each async for each in (consumer if ask == "iterate" else consumer.arrow_batches())]

            task = asyncio.create_task(waiting())
            await until(lambda consumer=consumer: consumer._consumer._fetcher._driver is not None)  # type: ignore[misc]
            if ask == "consume":
                await until(lambda consumer=consumer: len(consumer._earlier) > 1)  # type: ignore[misc]
            await consumer.close()
            assert await asyncio.wait_for(task, 30) == {"poll": None, "consume": 20}.get(ask, [])
            with pytest.raises(Closed):
                await consumer.poll()
            with pytest.raises(Closed):
                aiter(consumer)
            with pytest.raises(StopAsyncIteration):
                await anext(consumer)
            await consumer.close()

    asyncio.run(main())


def test_the_thread_ends_with_the_consumer(cluster: LocalCluster, filled: list[TopicPartition]) -> None:
    def threads() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "kafkalog-aio"}

    before = threads()

    async def main(is_closed: bool) -> None:
        consumer = aio.Consumer(cluster.bootstrap_servers)
        await consumer.assign(dict.fromkeys(filled, "latest"))
        assert await consumer.poll(timeout=0.05) is None
        assert threads() - before
        if is_closed:
            await consumer.close()

    for is_closed in (True, False):
        asyncio.run(main(is_closed))
        gc.collect()
        waited_for(lambda: not threads() - before)


# --- errors


def test_errors_are_raised_by_the_call_that_asks(cluster: LocalCluster, filled: list[TopicPartition]) -> None:
    where = filled[0]

    async def main() -> None:
        async with aio.Consumer(cluster.bootstrap_servers, auto_offset_reset="error") as consumer:
            with pytest.raises(InvalidArgument, match="no partition is assigned"):
                await consumer.poll()
            with pytest.raises(UnknownTopic):
                await consumer.assign({TopicPartition("no-such-topic", 0): 0})
            with pytest.raises(InvalidArgument, match="no group"):
                await consumer.commit()
            with pytest.raises(InvalidArgument, match="no group"):
                await consumer.subscribe("t")
            with pytest.raises(InvalidArgument, match="at least 1"):
                await consumer.consume(0)
            with pytest.raises(InvalidArgument, match="not a number of seconds"):
                await consumer.poll(timeout="1")  # type: ignore[arg-type]
            await consumer.assign({where: 9999})
            with pytest.raises(OffsetOutOfRange):
                await consumer.poll()
            assert isinstance(consumer.failures()[where], OffsetOutOfRange)
            with pytest.raises(OffsetOutOfRange):
                await consumer.consume(5)
            with pytest.raises(OffsetOutOfRange):
                await anext(consumer.arrow_batches())
            await consumer.seek(where, 4999)
            assert [message.offset async for message in firsts(consumer, 1)] == [4999]

    asyncio.run(main())


async def firsts(consumer: aio.Consumer, count: int) -> Any:
    async for message in consumer:
        yield message
        count -= 1
        if not count:
            return


def test_a_consumer_belongs_to_one_event_loop(cluster: LocalCluster, filled: list[TopicPartition]) -> None:
    consumer = aio.Consumer(cluster.bootstrap_servers)

    async def first() -> None:
        await consumer.assign({filled[0]: "latest"})
        assert await consumer.poll(timeout=0.05) is None

    async def second() -> None:
        with pytest.raises(InvalidArgument, match="two event loops"):
            await consumer.poll(timeout=0.05)
        await consumer.close()

    asyncio.run(first())
    asyncio.run(second())


def test_cut_connections_lose_nothing(cluster: LocalCluster, filled: list[TopicPartition]) -> None:
    async def main() -> list[Message]:
        found: list[Message] = []
        with proxied(cluster.bootstrap_servers, cluster.brokers[0].data_port, retry_backoff_ms=5) as (through, proxy):
            async with aio.Consumer(through, max_partition_fetch_bytes=8_000, retry_backoff_ms=5) as consumer:
                await consumer.assign(from_start(filled))
                async for message in firsts(consumer, 10_000):
                    found.append(message)
                    if len(found) % 900 == 0:
                        proxy.cut()
            assert proxy.accepted > 5
        return found

    check(asyncio.run(main()), filled, 5000)


# --- forks


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("waits", [False, True])
def test_a_forked_child_continues_where_the_parent_was(
    cluster: LocalCluster, admin: Admin, topic: str, waits: bool
) -> None:
    [where] = filled_with(3000, cluster, admin, topic, partitions=1)
    consumer = aio.Consumer(cluster.bootstrap_servers, group=topic)

    async def begin() -> None:
        await consumer.assign({where: 0})
        assert len(await consumer.consume(3000 if waits else 10)) == (3000 if waits else 10)
        if waits:
            assert await consumer.poll(timeout=0.05) is None
            fill(cluster, topic, range(3000, 3010), partitions=1)
            assert consumer._wait is not None
            await until(consumer._wait.found.done)

    async def go_on(offset: int) -> None:
        assert [message.offset for message in await consumer.consume(10)] == list(range(offset, offset + 10))
        assert await consumer.poll(timeout=0.05) is None or not waits
        await consumer.commit()
        await consumer.close()

    asyncio.run(begin())
    at = 3000 if waits else 10
    in_child(lambda: asyncio.run(go_on(at)))
    assert admin.committed(topic)[where] == at + 10
    asyncio.run(consumer.close())


# --- groups


def test_two_consumers_of_a_group_in_one_event_loop_share_a_topic(
    cluster: LocalCluster, admin: Admin, topic: str
) -> None:
    filled = filled_with(500, cluster, admin, topic, partitions=4)
    found: dict[str, list[Message]] = {"a": [], "b": []}
    told: dict[str, list[str]] = {"a": [], "b": []}

    async def main() -> None:
        loop_thread = threading.get_ident()

        async def read(name: str, consumer: aio.Consumer) -> None:
            async for message in consumer:
                found[name].append(message)

        def subscribed(name: str, consumer: aio.Consumer) -> Awaitable[None]:
            async def on_assigned(given: aio.Consumer, partitions: list[TopicPartition]) -> None:
                assert given is consumer
                assert threading.get_ident() == loop_thread
                assert await given.committed(partitions) is not None
                told[name].append(f"assigned {len(partitions)}")

            def on_revoked(given: aio.Consumer, partitions: list[TopicPartition]) -> None:
                assert given is consumer
                assert threading.get_ident() == loop_thread
                told[name].append(f"revoked {len(partitions)}")

            return consumer.subscribe(topic, on_assigned=on_assigned, on_revoked=on_revoked)

        async with aio.Consumer(cluster.bootstrap_servers, group=topic, **GROUP) as a:
            await subscribed("a", a)
            reading_a = asyncio.create_task(read("a", a))
            await until(lambda: len(a.assignment()) == 4 and len(found["a"]) == 2000)
            async with aio.Consumer(cluster.bootstrap_servers, group=topic, **GROUP) as b:
                await subscribed("b", b)
                reading_b = asyncio.create_task(read("b", b))
                await until(lambda: len(a.assignment()) == len(b.assignment()) == 2)
                fill(cluster, topic, range(500, 1000), partitions=4)
                await until(lambda: len(found["a"]) + len(found["b"]) >= 4000)
            await asyncio.wait_for(reading_b, 30)
            await until(lambda: len(a.assignment()) == 4)
            fill(cluster, topic, range(1000, 1500), partitions=4)
            await until(lambda: len(found["a"]) + len(found["b"]) >= 6000)
        await asyncio.wait_for(reading_a, 30)

    asyncio.run(main())
    assert len(found["b"]) == 1000
    check(sorted(found["a"] + found["b"], key=lambda message: message.offset), filled, 1500)
    assert told["a"][:1] == ["assigned 4"] and "revoked 2" in told["a"] and "assigned 2" in told["a"]
    assert told["b"] == ["assigned 2", "revoked 2"]


@pytest.mark.parametrize("way", ["poll", "iterate", "consume", "arrow"])
def test_nothing_more_is_returned_once_the_lease_has_ended(
    cluster: LocalCluster, admin: Admin, topic: str, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """What comes next is of the next membership, and begins at the last commit."""
    filled_with(10, cluster, admin, topic, partitions=1)
    quick = {**GROUP, "session_timeout_ms": 2000, "heartbeat_interval_ms": 100}

    async def main() -> None:
        async def next_offset() -> int:
            if way == "arrow":
                batch = await anext(consumer.arrow_batches(30))
                return int(batch["offset"][0].as_py())
            if way == "consume":
                while not (found := await consumer.consume(1, 30)):
                    pass
                return found[0].offset
            message = await anext(consumer) if way == "iterate" else await consumer.poll(30)
            assert message is not None
            return message.offset

        def end_the_lease() -> None:
            membership = consumer._consumer._membership
            assert membership is not None
            epochs.append(membership._epoch)
            membership._lease.end = -1.0

        epochs: list[int] = []
        async with aio.Consumer(cluster.bootstrap_servers, group=topic, **quick) as consumer:
            await consumer.subscribe(topic)
            if way == "arrow":  # all in one batch: the lease ends before that is returned
                amid(monkeypatch, consumer._cursors, "next_arrow", end_the_lease)
            else:
                assert [await next_offset() for _ in range(3)] == [0, 1, 2]
                end_the_lease()
            assert await next_offset() == 0
            membership = consumer._consumer._membership
            assert membership is not None and membership._epoch > epochs[0]

    asyncio.run(main())


async def lose_and_join_again(consumer: aio.Consumer) -> None:
    membership = consumer._consumer._membership
    assert membership is not None
    epoch, membership._lease.end = membership._epoch, -1.0
    await until(lambda: membership._epoch > epoch and bool(consumer.assignment()))


@pytest.mark.parametrize("is_awaited", [True, False])
def test_a_record_that_no_call_has_returned_was_not_asked_for_since_the_lease_ended(
    cluster: LocalCluster, admin: Admin, topic: str, is_awaited: bool
) -> None:
    """A commit says that what was processed before is lost, although the consumer's thread has taken more."""
    filled_with(1, cluster, admin, topic, partitions=1)
    quick = {**GROUP, "session_timeout_ms": 2000, "heartbeat_interval_ms": 100, "enable_auto_commit": False}

    async def main() -> None:
        async with aio.Consumer(cluster.bootstrap_servers, group=topic, **quick) as consumer:
            await consumer.subscribe(topic)
            assert await consumer.poll(30) is not None
            if is_awaited:
                waiting = asyncio.create_task(consumer.poll(30))
                await until(lambda: consumer._wait is not None)
            else:
                assert await consumer.poll(0.01) is None
            wait = consumer._wait
            assert wait is not None
            await lose_and_join_again(consumer)
            await until(wait.found.done)
            if is_awaited:
                assert await waiting is not None
            else:
                with pytest.raises(NotOwner):
                    await consumer.commit()
                assert await consumer.poll(30) is not None
            await consumer.commit()

    asyncio.run(main())


def test_callbacks_commit_after_a_lost_lease_as_ever(cluster: LocalCluster, admin: Admin, topic: str) -> None:
    [place] = filled_with(2, cluster, admin, topic, partitions=1)
    quick = {**GROUP, "session_timeout_ms": 2000, "heartbeat_interval_ms": 100, "enable_auto_commit": False}
    told: list[str] = []

    async def assigned(given: aio.Consumer, partitions: list[TopicPartition]) -> None:
        if told:
            given.pause(partitions)
            await given.commit()
        told.append("assigned")

    async def revoked(given: aio.Consumer, partitions: list[TopicPartition]) -> None:
        await given.commit()
        await given.commit(dict.fromkeys(partitions, 0))
        told.append("revoked")

    async def main() -> None:
        async with aio.Consumer(cluster.bootstrap_servers, group=topic, **quick) as consumer:
            await consumer.subscribe(topic, on_assigned=assigned, on_revoked=revoked)
            assert len(await consumer.consume(2, 30)) == 2
            await consumer.commit({place: 1})
            assert await consumer.poll(0.01) is None  # its thread waits on, and is the one that calls
            await lose_and_join_again(consumer)
            await until(lambda: len(told) == 2)
            with pytest.raises(NotOwner):
                await consumer.commit()

    asyncio.run(main())
    assert told == ["assigned", "assigned", "revoked"]
    assert admin.committed(topic) == {place: 0}


def test_a_consumer_that_nobody_has_any_more_leaves_its_group(cluster: LocalCluster, admin: Admin, topic: str) -> None:
    filled_with(1, cluster, admin, topic)

    async def main() -> None:
        consumer = aio.Consumer(cluster.bootstrap_servers, group=topic, **GROUP)
        await consumer.subscribe(topic)
        assert len(await consumer.consume(2)) == 2
        assert len(admin.describe_group(topic).members) == 1

    asyncio.run(main())
    gc.collect()
    waited_for(lambda: not admin.describe_group(topic).members, 5, "its session has not ended by then")


@pytest.mark.parametrize("is_due", [False, True], ids=["called", "due"])
def test_a_consumer_that_nobody_has_any_more_waits_for_no_loop_that_has_stopped(
    cluster: LocalCluster, admin: Admin, topic: str, is_due: bool
) -> None:
    """Neither to call it at its end, nor for a callback that was due when it was dropped."""
    filled_with(1, cluster, admin, topic)
    before, loop = set(threading.enumerate()), asyncio.new_event_loop()
    consumer = aio.Consumer(cluster.bootstrap_servers, group=topic, **{**GROUP, "session_timeout_ms": 60_000})
    told: list[str] = []
    loop.run_until_complete(
        consumer.subscribe(
            topic,
            on_assigned=lambda *_: told.append("assigned"),
            on_revoked=lambda *_: told.append("revoked"),
        )
    )
    if is_due:
        loop.run_until_complete(consumer.poll(0.0))
        membership = consumer._consumer._membership
        assert membership is not None
        waited_for(lambda: membership.callbacks._serving is not None)
    else:
        assert len(loop.run_until_complete(consumer.consume(2))) == 2
    del consumer
    gc.collect()
    waited_for(lambda: not admin.describe_group(topic).members, 30, "its session has not ended by then")
    waited_for(lambda: not set(threading.enumerate()) - before)
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    assert told == ([] if is_due else ["assigned"])


def test_an_error_of_a_callback_is_raised_to_who_reads(cluster: LocalCluster, filled: list[TopicPartition]) -> None:
    async def main() -> None:
        async def on_assigned(consumer: aio.Consumer, partitions: list[TopicPartition]) -> None:
            for each in partitions:
                await consumer.seek(each, 4990)
            raise ZeroDivisionError

        async with aio.Consumer(cluster.bootstrap_servers, group=filled[0].topic, **GROUP) as consumer:
            await consumer.subscribe([filled[0].topic], on_assigned=on_assigned)
            with pytest.raises(ZeroDivisionError):
                await consumer.poll()
            assert {message.offset for message in await consumer.consume(20)} == set(range(4990, 5000))
            await consumer.unsubscribe()
            assert consumer.assignment() == []

    asyncio.run(main())


def test_a_callback_cannot_read(cluster: LocalCluster, filled: list[TopicPartition]) -> None:
    """Also not in a task that it waits for; a task that it began may read once it has returned."""
    told: list[str] = []
    later: list[asyncio.Task[Message | None]] = []

    async def main() -> None:
        async def read_later(consumer: aio.Consumer, returned: asyncio.Event) -> Message | None:
            await returned.wait()
            return await consumer.poll(30)

        async def on_assigned(consumer: aio.Consumer, _: list[TopicPartition]) -> None:
            for how in (consumer.poll, consumer.consume, consumer.__anext__, consumer.arrow_batches().__anext__):
                for waiting in (how(), asyncio.wait_for(how(), 30)):
                    with pytest.raises(InvalidArgument, match="a callback of a subscription cannot read") as raised:
                        await waiting
                    told.append(str(raised.value))
            later.append(asyncio.create_task(read_later(consumer, returned)))

        returned = asyncio.Event()
        async with aio.Consumer(cluster.bootstrap_servers, group=filled[0].topic, **GROUP) as consumer:
            await consumer.subscribe([filled[0].topic], on_assigned=on_assigned)
            async with asyncio.timeout(60):
                assert len(await consumer.consume(10)) == 10
                returned.set()
                assert await later[0] is not None

    asyncio.run(main())
    assert len(told) == 8


@pytest.mark.parametrize("way", ["close", "unsubscribe", "subscribe"])
def test_what_leaves_the_group_does_not_wait_for_the_callback_that_called_it(
    cluster: LocalCluster, filled: list[TopicPartition], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Nor for the `on_revoked` that it calls itself."""
    monkeypatch.setattr(threaded, "_LEAVE_SECONDS", 120.0)
    [topic] = {partition.topic for partition in filled}
    told: list[str] = []

    async def main() -> None:
        async def leave(consumer: aio.Consumer, told_then: str) -> None:
            if way == "subscribe":
                await consumer.subscribe(topic)
            else:
                await (consumer.close(120) if way == "close" else consumer.unsubscribe())
            told.append(told_then)

        consumer = aio.Consumer(cluster.bootstrap_servers, group=topic, **GROUP)
        await consumer.subscribe(
            topic,
            on_assigned=lambda consumer, _: leave(consumer, "assigned"),
            on_revoked=lambda consumer, _: leave(consumer, "revoked"),
        )
        reading = asyncio.create_task(consumer.poll())
        await until(lambda: len(told) == 2, 20)
        await consumer.close()
        with suppress(InvalidArgument):  # nothing is assigned
            await reading

    asyncio.run(main())
    assert told == ["revoked", "assigned"]


def test_an_error_of_a_callback_in_consume_counts_nothing_as_processed(
    cluster: LocalCluster, admin: Admin, topic: str
) -> None:
    filled = [*filled_with(5, cluster, admin, topic, partitions=1), TopicPartition(topic, 1)]

    async def main() -> None:
        def on_assigned(_: aio.Consumer, partitions: list[TopicPartition]) -> None:
            if filled[1] in partitions:
                raise ZeroDivisionError

        async with aio.Consumer(cluster.bootstrap_servers, group=topic, **GROUP) as consumer:
            await consumer.subscribe([topic], on_assigned=on_assigned)
            waiting = asyncio.create_task(consumer.consume(15, timeout=30))
            await until(lambda: bool(consumer._cursors.in_hand(filled)))
            await in_thread(partial(admin.alter_topic, topic, partitions=2))
            with pytest.raises(ZeroDivisionError):
                await waiting
            check(await consumer.consume(5), filled[:1], 5)

    asyncio.run(main())


def test_consume_returns_what_it_has_of_a_partition_that_is_to_go(
    cluster: LocalCluster, admin: Admin, topic: str
) -> None:
    filled = filled_with(5, cluster, admin, topic)

    async def main() -> None:
        async with (
            aio.Consumer(cluster.bootstrap_servers, group=topic, **GROUP) as one,
            aio.Consumer(cluster.bootstrap_servers, group=topic, **GROUP) as other,
        ):
            await one.subscribe([topic])
            waiting = asyncio.create_task(one.consume(100))
            await until(lambda: one._cursors.in_hand(filled) == set(filled))
            await other.subscribe([topic])
            check(await asyncio.wait_for(waiting, 20), filled, 5)
            going_on = asyncio.create_task(one.poll())
            await until(lambda: len(one.assignment()) == len(other.assignment()) == 1)
            fill(cluster, topic, range(1))
            message = await going_on
            assert message is not None and message.offset == 5

    asyncio.run(main())


@asynccontextmanager
async def two_of(cluster: LocalCluster, topic: str) -> AsyncIterator[tuple[aio.Consumer, aio.Consumer]]:
    """Two consumers of a group, of which the other one is assigned the topic's first partition."""
    async with (
        aio.Consumer(cluster.bootstrap_servers, group=topic, client_id="b", **BY_NAME) as one,
        aio.Consumer(cluster.bootstrap_servers, group=topic, client_id="a", **BY_NAME) as other,
    ):
        yield one, other


async def next_of(consumer: aio.Consumer, way: str, seconds: float) -> tuple[int, int] | None:
    """The partition and offset of the next record; None: it does not come in time."""
    if way == "arrow":
        async for batch in consumer.arrow_batches(seconds):
            first = batch.slice(0, 1).to_pylist()[0]
            return first["partition"], first["offset"]
        return None
    message = await consumer.poll(seconds)
    return None if message is None else (message.partition, message.offset)


@pytest.mark.parametrize("way", ["poll", "arrow"])
def test_records_that_came_after_their_call_hold_up_no_partition(
    cluster: LocalCluster, admin: Admin, topic: str, way: str
) -> None:
    """Nobody may ever ask for them. Who reads the partition next gets them."""
    [where, _] = filled_with(0, cluster, admin, topic)

    async def main() -> None:
        async with two_of(cluster, topic) as (one, other):
            await one.subscribe([topic])
            fill(cluster, topic, range(5), partitions=1)
            assert await next_of(one, way, 30) == (0, 0)
            while await next_of(one, way, 0.1) or len(one.assignment()) < 2 or await one.position(where) < 5:
                pass
            fill(cluster, topic, range(5, 10), partitions=1)
            wait = one._wait
            assert wait is not None
            await until(wait.found.done)
            assert one._cursors.in_hand(one.assignment()) == {where}
            await other.subscribe([topic])
            assert await next_of(other, way, 30) == (0, 5)
            with Producer(cluster.bootstrap_servers) as producer:
                producer.send(topic, b"", partition=1)
            assert await next_of(one, way, 30) == (1, 0)

    asyncio.run(main())


@pytest.mark.parametrize("way", ["poll", "arrow"])
def test_records_that_a_call_has_returned_hold_up_their_partition(
    cluster: LocalCluster, admin: Admin, topic: str, way: str
) -> None:
    """Until the next ones are asked for."""
    [where, _] = filled_with(1, cluster, admin, topic)

    async def main() -> None:
        async with two_of(cluster, topic) as (one, other):
            await one.subscribe([topic])
            while await next_of(one, way, 30) != (0, 0):
                pass
            cursor = one._cursors.of(where)
            await other.subscribe([topic])
            await until(lambda: bool(cursor.hold & Hold.REVOKED))
            assert one._cursors.in_hand([where]) == {where}
            while await next_of(one, way, 0.05):
                pass
            fill(cluster, topic, range(1, 2))
            assert await next_of(other, way, 30) == (0, 1)

    asyncio.run(main())


@pytest.mark.parametrize("way", ["poll", "arrow"])
def test_records_that_came_after_their_call_are_returned_after_a_pause(
    cluster: LocalCluster, admin: Admin, topic: str, way: str
) -> None:
    [where] = filled_with(0, cluster, admin, topic, partitions=1)

    async def main() -> None:
        async with aio.Consumer(cluster.bootstrap_servers) as consumer:
            await consumer.assign({where: "earliest"})
            assert await next_of(consumer, way, 0) is None
            fill(cluster, topic, range(5), partitions=1)
            wait = consumer._wait
            assert wait is not None
            await until(wait.found.done)
            consumer.pause([where])
            assert await next_of(consumer, way, 0.05) is None
            consumer.resume([where])
            assert await next_of(consumer, way, 30) == (0, 0)
            assert await consumer.position(where) == 0

    asyncio.run(main())


def test_closing_a_subscribed_consumer_ends_a_wait_whatever_wakes_it(
    cluster: LocalCluster, filled: list[TopicPartition]
) -> None:
    async def main() -> None:
        consumer = aio.Consumer(cluster.bootstrap_servers, group=filled[0].topic, **GROUP)
        await consumer.subscribe([filled[0].topic])
        await consumer.consume(10_000)
        waiting = asyncio.create_task(consumer.poll())
        fetcher = consumer._consumer._fetcher
        await until(lambda: fetcher._driver is not None)
        close = fetcher.close

        def close_after_a_wake(*given: Any) -> None:  # the member has left, and the connections are open
            with fetcher.lock:
                fetcher.call()
            with suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(asyncio.wait_for(asyncio.shield(waiting), 0.5), loop).result()
            close(*given)

        loop = asyncio.get_running_loop()
        fetcher.close = close_after_a_wake  # type: ignore[method-assign, assignment]
        await consumer.close()
        assert await asyncio.wait_for(waiting, 30) is None

    asyncio.run(main())
