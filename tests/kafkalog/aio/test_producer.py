"""The producer for asyncio against a real broker: what was taken is delivered once, and the event loop never waits."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pyarrow as pa
import pytest

from broker.local import LocalCluster
from kafkalog import Admin, aio
from kafkalog.errors import (
    BufferExhausted,
    Closed,
    DeliveryTimedOut,
    InvalidArgument,
    RecordTooLarge,
    UnknownPartition,
    UnknownTopic,
)
from tests.kafkalog.aio.test_consumer import Ticker, until
from tests.kafkalog.aio.turns import turns_of_others
from tests.kafkalog.client.test_forks import in_child
from tests.proxy import proxied
from tests.reading import messages_of
from tests.threads import NoThreads
from tests.waiting import suspend

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def admin(cluster: LocalCluster) -> Iterator[Admin]:
    with Admin(cluster.bootstrap_servers) as connected:
        yield connected


@pytest.fixture
def made(admin: Admin, topic: str) -> str:
    """A topic of two partitions."""
    admin.create_topic(topic, partitions=2)
    return topic


def values_in(cluster: LocalCluster, topic: str, partition: int = 0) -> list[int]:
    return [int(message.value or b"") for message in messages_of(cluster.bootstrap_servers, topic)[partition]]


def test_records_arrive_in_order_and_handles_name_their_place(cluster: LocalCluster, made: str) -> None:
    async def main() -> None:
        async with aio.Producer(cluster.bootstrap_servers) as producer:
            sent = [await producer.send(made, b"%d" % number, b"key", partition=1) for number in range(5000)]
            placed = await asyncio.gather(*sent)
            assert [each.offset for each in placed] == list(range(5000))
            assert {(each.topic, each.partition) for each in placed} == {(made, 1)}
            assert (await sent[17]).offset == 17 and sent[17].done()
            last = await producer.send_and_wait(made, None, partition=0, timestamp_us=5, headers={"a": b"b"})
            assert last == (made, 0, 0, 5)

    asyncio.run(main())
    assert values_in(cluster, made, 1) == list(range(5000))


def test_what_is_not_awaited_is_sent_at_the_end_of_the_block(cluster: LocalCluster, made: str) -> None:
    async def main() -> None:
        async with aio.Producer(cluster.bootstrap_servers, linger_ms=60_000, delivery_timeout_ms=90_000) as producer:
            for number in range(100):
                await producer.send(made, b"%d" % number, partition=0)
            await producer.flush()
            for number in range(100, 200):
                await producer.send(made, b"%d" % number, partition=0)

    asyncio.run(main())
    assert values_in(cluster, made) == list(range(200))


def test_many_tasks_that_wait_for_their_acks_share_batches(cluster: LocalCluster, made: str) -> None:
    async def main() -> int:
        async with aio.Producer(cluster.bootstrap_servers, linger_ms=60_000, delivery_timeout_ms=90_000) as producer:
            await producer.send_and_wait(made, b"0", partition=0)
            watched = []
            watch = producer._watch
            producer._watch = lambda *given: watched.append(given) or watch(*given)  # type: ignore[method-assign]
            await asyncio.gather(*(producer.send_and_wait(made, b"%d" % n, partition=0) for n in range(1, 500)))
            return len(watched)

    assert asyncio.run(main()) < 20  # and no wait of 60 s
    assert values_in(cluster, made) == list(range(500))


def test_lists_are_sent(cluster: LocalCluster, made: str) -> None:
    async def main() -> None:
        async with aio.Producer(cluster.bootstrap_servers, buffer_memory=20_000) as producer:
            sent = [b"%d" % number for number in range(5000)]
            placed = await producer.send_many(made, sent, partition=0)
            assert sum(records for _, _, records in placed) == 5000

    asyncio.run(main())
    assert values_in(cluster, made) == list(range(5000))


def test_tables_are_sent(cluster: LocalCluster, made: str) -> None:
    async def main() -> None:
        async with aio.Producer(cluster.bootstrap_servers, buffer_memory=20_000) as producer:
            table = pa.table({"value": [b"%d" % number for number in range(5000)]})
            placed = await producer.send_arrow(made, table, partition=0)
            assert sum(rows for _, _, rows in placed) == 5000

    asyncio.run(main())
    assert values_in(cluster, made) == list(range(5000))


def test_a_full_buffer_is_waited_for_by_many_without_holding_up_the_event_loop(made: str) -> None:
    with LocalCluster() as own:
        with Admin(own.bootstrap_servers) as connected:
            connected.create_topic(made, partitions=1)
        pid = own.brokers[0].pid
        assert pid is not None

        async def main() -> None:
            async with aio.Producer(own.bootstrap_servers, buffer_memory=40_000, batch_size=4000) as producer:
                await producer.send_and_wait(made, b"0")
                ticker = Ticker()
                suspend(pid)
                try:
                    sending = [asyncio.create_task(producer.send(made, b"%d" % n, None, 0)) for n in range(1, 3000)]
                    await until(lambda: producer._room is not None and ticker.ticks > 100)
                    assert 0 < sum(task.done() for task in sending) < 2999
                    cancelled = sending[-500:]
                    for task in cancelled:
                        task.cancel()
                    await asyncio.wait(cancelled)
                    assert all(task.cancelled() for task in cancelled)
                finally:
                    os.kill(pid, signal.SIGCONT)
                placed = await asyncio.gather(*[await task for task in sending[:-500]])
                assert {each.partition for each in placed} == {0}
                ticker.stop()

        asyncio.run(main())
        assert sorted(values_in(own, made)) == list(range(2500))


def test_one_task_keeps_its_order_through_a_full_buffer(cluster: LocalCluster, made: str) -> None:
    async def main() -> None:
        async with aio.Producer(cluster.bootstrap_servers, buffer_memory=20_000, batch_size=2000) as producer:
            for number in range(5000):
                await producer.send(made, b"%d" % number, partition=0)

    asyncio.run(main())
    assert values_in(cluster, made) == list(range(5000))


def test_room_is_waited_for_no_longer_than_max_block_ms(cluster: LocalCluster, made: str) -> None:
    async def main() -> None:
        with proxied(cluster.bootstrap_servers, cluster.brokers[0].data_port, request_timeout_ms=60_000) as (
            behind,
            proxy,
        ):
            proxy.hold_answers()
            async with aio.Producer(
                behind, buffer_memory=4000, batch_size=1000, max_block_ms=200, delivery_timeout_ms=90_000
            ) as producer:

                async def fill() -> None:
                    while True:
                        await producer.send(made, b"x" * 100, partition=0)

                with pytest.raises(BufferExhausted, match="200"):
                    await fill()
                waiting = asyncio.create_task(producer.send(made, b"x" * 100, partition=0))
                await until(lambda: producer._room is not None)
                closing = asyncio.create_task(producer.close(timeout=0.2))
                with pytest.raises((Closed, BufferExhausted)):
                    await waiting
                proxy.cut()
                await asyncio.wait([closing])

    asyncio.run(main())


@pytest.mark.parametrize("limit", [0.0, 0.0005, 0.002])
def test_cancelled_waits_neither_lose_nor_double_a_record(cluster: LocalCluster, made: str, limit: float) -> None:
    async def main() -> tuple[int, int]:
        taken = cancelled = 0
        async with aio.Producer(cluster.bootstrap_servers, buffer_memory=3000, batch_size=500) as producer:
            await producer.send_and_wait(made, b"0", partition=0)
            while taken + cancelled < 2000:
                try:
                    async with asyncio.timeout(limit * ((taken + cancelled) % 3)):  # also 0: a broker may be quick
                        delivery = await producer.send(made, b"%d" % (taken + 1), partition=0)
                        taken += 1
                        await delivery
                except TimeoutError:
                    cancelled += 1
        return taken, cancelled

    taken, cancelled = asyncio.run(main())
    assert taken > 0 and cancelled > 0
    assert values_in(cluster, made) == list(range(taken + 1))


def test_errors_of_a_record_are_raised_by_its_call(
    cluster: LocalCluster, made: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with aio.Producer(cluster.bootstrap_servers) as producer:
            with pytest.raises(UnknownTopic):
                await producer.send("no-such-topic", b"")
            tried = await asyncio.gather(
                *(producer.send("no-such-topic", b"") for _ in range(500)), return_exceptions=True
            )
            assert {type(each) for each in tried} == {UnknownTopic}
            for wrong in (7, [7], None):
                with pytest.raises(InvalidArgument, match="topic"):
                    await producer.send(wrong, b"")  # type: ignore[arg-type]
            for _ in range(2):  # a topic that is not known yet, and one that is
                with pytest.raises(UnknownPartition):
                    await producer.send(made, b"", partition=2)
                with pytest.raises(InvalidArgument, match="partition"):
                    await producer.send(made, b"", partition="1")  # type: ignore[arg-type]
                with pytest.raises(InvalidArgument, match="value"):
                    await producer.send(made, "text")  # type: ignore[arg-type]
            with pytest.raises(RecordTooLarge):
                await producer.send(made, bytes(50_000_000))
            nothreads = NoThreads(monkeypatch, lambda name: name == "kafkalog-background")
            with pytest.raises(Exception, match="thread"):
                await producer.flush()
            nothreads.on = False
        with pytest.raises(Closed):
            await producer.send(made, b"")
        await producer.close()

    asyncio.run(main())


def test_a_failed_delivery_is_raised_where_it_is_awaited_and_else_by_flush(cluster: LocalCluster, made: str) -> None:
    async def main() -> None:
        with proxied(cluster.bootstrap_servers, cluster.brokers[0].data_port) as (behind, proxy):
            proxy.hold_answers()
            producer = aio.Producer(behind, delivery_timeout_ms=300, request_timeout_ms=300)
            deliveries = [await producer.send(made, b"x", partition=0) for _ in range(3)]
            for delivery in deliveries:
                with pytest.raises(DeliveryTimedOut):
                    await delivery
            await producer.flush()
            await producer.send(made, b"x", partition=0)
            with pytest.raises(DeliveryTimedOut):
                await producer.flush()
            await producer.send(made, b"x", partition=0)
            with pytest.raises(ZeroDivisionError):
                async with producer:
                    raise ZeroDivisionError
            with pytest.raises(Closed):
                await producer.send(made, b"x", partition=1)

    asyncio.run(main())


@pytest.mark.parametrize("how", ["await", "send_many", "send_arrow", "flush", "close"])
def test_a_failure_whose_call_was_cancelled_is_told_by_the_next(cluster: LocalCluster, made: str, how: str) -> None:
    async def main() -> None:
        with proxied(cluster.bootstrap_servers, cluster.brokers[0].data_port) as (behind, proxy):
            producer = aio.Producer(behind, delivery_timeout_ms=1500, request_timeout_ms=500)
            await producer.send_arrow(made, pa.table({"value": [b"x"]}), partition=0)  # the first one imports for long
            proxy.hold_answers()

            async def call() -> object:
                if how == "send_many":
                    return await producer.send_many(made, [b"x"], partition=0)
                if how == "send_arrow":
                    return await producer.send_arrow(made, pa.table({"value": [b"x"]}), partition=0)
                delivery = await producer.send(made, b"x", partition=0)
                return await (delivery if how == "await" else producer.flush() if how == "flush" else producer.close())

            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(call(), 0.3)
            batches = producer._accumulator.unfinished
            await until(lambda: not batches())
            if how != "close":
                with pytest.raises(DeliveryTimedOut):
                    await producer.flush()
                await producer.flush()
            else:
                with pytest.raises(DeliveryTimedOut):
                    await producer.close()
            await producer.close()
            proxy.cut()

    asyncio.run(main())


def test_no_send_waits_in_the_event_loop_whoever_looked_the_topic_up(cluster: LocalCluster, made: str) -> None:
    async def main() -> None:
        with proxied(cluster.bootstrap_servers, cluster.brokers[0].data_port) as (behind, proxy):
            producer = aio.Producer(behind, buffer_memory=100_000, max_block_ms=3000, delivery_timeout_ms=9000)
            await producer.send_many(made, [b"0"], partition=0)
            proxy.hold_answers()
            ticker = Ticker()
            sending = [producer.send(made, bytes(10_000), partition=0) for _ in range(100)]
            with pytest.raises(BufferExhausted):
                await asyncio.gather(*sending)
            ticker.stop()
            assert ticker.longest < 1.0
            proxy.cut()
            await producer.close()

    asyncio.run(main())


def test_a_producer_in_two_event_loops_says_so(cluster: LocalCluster, made: str) -> None:
    producer = aio.Producer(cluster.bootstrap_servers, linger_ms=60_000)
    lingering = asyncio.run(producer.send(made, b"0", partition=0))

    async def await_it() -> None:
        await lingering

    for call in (
        lambda: producer.send_and_wait(made, b"1", partition=0),
        lambda: producer.send_many(made, [b"1"]),
        lambda: producer.send_arrow(made, pa.table({"value": [b"1"]})),
        await_it,
    ):
        with pytest.raises(InvalidArgument, match="two event loops"):
            asyncio.run(call())
    asyncio.run(producer.close())
    assert values_in(cluster, made) == [0]


def noted(producer: aio.Producer, untold: str) -> list[BaseException]:
    """Errors of cancelled calls, each once the method of that name has taken it in."""
    take_in, found = getattr(producer, untold), list[BaseException]()

    def note(error: BaseException) -> None:
        take_in(error)
        found.append(error)

    setattr(producer, untold, note)
    return found


def test_the_time_of_a_cancelled_flush_is_nobodys_failure_and_hides_none(cluster: LocalCluster, made: str) -> None:
    async def main() -> None:
        with proxied(cluster.bootstrap_servers, cluster.brokers[0].data_port) as (behind, proxy):
            producer = aio.Producer(behind, delivery_timeout_ms=1500, request_timeout_ms=500)
            ended = noted(producer, "_flush_untold")
            await producer.send_and_wait(made, b"0", partition=0)
            for is_lost in (False, True):
                ended.clear()
                proxy.hold_answers()
                await producer.send(made, b"1", partition=0)
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(producer.flush(timeout=0.3), 0.1)
                await until(lambda: bool(ended))  # the flush itself
                if not is_lost:
                    proxy.cut()
                    await producer.flush()
            with pytest.raises(DeliveryTimedOut):
                await producer.flush()
            await producer.flush()
            proxy.cut()
            await producer.close()

    asyncio.run(main())


def test_a_cancelled_flush_that_failed_hides_no_later_failure(cluster: LocalCluster, made: str) -> None:
    async def main() -> None:
        with proxied(cluster.bootstrap_servers, cluster.brokers[0].data_port) as (behind, proxy):
            producer = aio.Producer(behind, delivery_timeout_ms=1500, request_timeout_ms=500)
            ended = noted(producer, "_flush_untold")
            try:
                await producer.send_and_wait(made, b"0", partition=0)
                proxy.hold_answers()
                await producer.send(made, b"1", partition=0)
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(producer.flush(), 0.1)
                await until(lambda: bool(ended))
                await producer.send(made, b"2", partition=0)
                for _ in range(2):
                    with pytest.raises(DeliveryTimedOut):
                        await producer.flush()
                await producer.flush()
            finally:
                proxy.cut()
                await producer.close()

    asyncio.run(main())


def test_the_time_of_a_cancelled_close_beside_another_is_not_the_others_failure(
    cluster: LocalCluster, made: str
) -> None:
    async def main() -> None:
        with proxied(cluster.bootstrap_servers, cluster.brokers[0].data_port) as (behind, proxy):
            producer = aio.Producer(behind)
            ended = noted(producer, "_close_untold")
            try:
                await producer.send_and_wait(made, b"0", partition=0)
                proxy.hold_answers()
                await producer.send(made, b"1", partition=0)
                closing = asyncio.create_task(producer.close())
                await until(lambda: producer._producer._closing is not None)
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(producer.close(timeout=0.3), 0.1)
                await until(lambda: bool(ended))
            finally:
                proxy.cut()
            await closing

    asyncio.run(main())


def test_the_time_of_a_cancelled_close_of_its_own_is_told_by_the_next(cluster: LocalCluster, made: str) -> None:
    async def main() -> None:
        with proxied(cluster.bootstrap_servers, cluster.brokers[0].data_port) as (behind, proxy):
            producer = aio.Producer(behind)
            ended = noted(producer, "_close_untold")
            await producer.send_and_wait(made, b"0", partition=0)
            proxy.hold_answers()
            await producer.send(made, b"1", partition=0)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(producer.close(timeout=0.3), 0.1)
            await until(lambda: bool(ended))
            with pytest.raises(type(ended[0])):
                await producer.close()
            await producer.close()

    asyncio.run(main())


def test_a_closing_producer_serves_no_other_event_loop(cluster: LocalCluster, made: str) -> None:
    with proxied(cluster.bootstrap_servers, cluster.brokers[0].data_port) as (behind, proxy):
        producer = aio.Producer(behind)

        async def leave_one_waiting() -> aio.Delivery:
            await producer.send_and_wait(made, b"0", partition=0)
            proxy.hold_answers()
            sent = await producer.send(made, b"1", partition=0)
            waiting = asyncio.ensure_future(sent)
            await until(lambda: bool(producer._waits))
            waiting.cancel()
            return sent

        async def await_it(sent: aio.Delivery) -> None:
            closing = asyncio.create_task(producer.close())
            try:
                await until(lambda: producer._accumulator.closed is not None)
                with pytest.raises(Closed):
                    await asyncio.wait_for(asyncio.ensure_future(sent), 30)
                with pytest.raises(Closed):
                    await asyncio.wait_for(producer.send("another", b"2"), 30)
            finally:
                proxy.cut()
            await closing
            assert (await sent).offset == 1

        asyncio.run(await_it(asyncio.run(leave_one_waiting())))


def test_closing_ends_waits_for_acks(cluster: LocalCluster, made: str) -> None:
    async def main() -> None:
        with proxied(cluster.bootstrap_servers, cluster.brokers[0].data_port) as (behind, proxy):
            proxy.hold_answers()
            producer = aio.Producer(behind)
            waiting = asyncio.create_task(producer.send_and_wait(made, b"x"))
            await until(lambda: bool(producer._waits))
            with pytest.raises(Exception, match="flush"):
                await producer.close(timeout=0.1)
            with pytest.raises(Closed):
                await asyncio.wait_for(waiting, 30)
            assert producer._waits == {}

    asyncio.run(main())


def test_other_tasks_run_while_one_sends_without_waiting(cluster: LocalCluster, made: str) -> None:
    async def main() -> None:
        async with aio.Producer(cluster.bootstrap_servers) as producer:
            await producer.send(made, b"")
            async with turns_of_others() as turns:
                for _ in range(20_000):
                    await producer.send(made, b"")
            assert turns() > 10

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
def test_a_forked_child_needs_a_producer_of_its_own(cluster: LocalCluster, made: str) -> None:
    producer = aio.Producer(cluster.bootstrap_servers)

    async def begin() -> None:
        await producer.send_and_wait(made, b"0", partition=0)

    async def refused() -> None:
        with pytest.raises(Closed, match="before a fork"):
            await producer.send(made, b"1", partition=0)
        async with aio.Producer(cluster.bootstrap_servers) as own:
            await own.send_and_wait(made, b"1", partition=0)

    asyncio.run(begin())
    in_child(lambda: asyncio.run(refused()))
    asyncio.run(producer.close())
    assert values_in(cluster, made) == [0, 1]
