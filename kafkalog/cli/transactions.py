"""`kafkalog transactions ...`: show decisions and staged rows of exactly-once writes, and resolve those that are
stuck."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from kafkalog.cli.command import CommandGroup, bootstrap_option, confirm, json_option
from kafkalog.cli.output import admin_of, counted, print_json, print_rows, print_table
from kafkalog.config import nearest_hint
from kafkalog.errors import UnknownTransaction
from kafkalog.records import TopicPartition

if TYPE_CHECKING:
    from kafkalog.client.transaction.coordinator import TransactionCoordinator
    from kafkalog.format.decisions import Decision
    from kafkalog.wire.transactions_pb2 import StagedSet


@click.group(cls=CommandGroup)
def transactions() -> None:
    """List, describe, abort, resolve and forget exactly-once writes."""


@contextmanager
def _coordinator(bootstrap: str) -> Iterator[TransactionCoordinator]:
    from kafkalog.client.cluster import Cluster
    from kafkalog.client.transaction.coordinator import TransactionCoordinator

    with admin_of(bootstrap):
        pass  # it answers
    cluster = Cluster(bootstrap)
    coordinator = TransactionCoordinator(cluster)
    try:
        yield coordinator
    finally:
        coordinator.close()
        cluster.close()


def _known(coordinator: TransactionCoordinator, transaction: str) -> tuple[Decision, list[StagedSet]]:
    """The transaction's decision and what is staged of it. Raises UnknownTransaction."""
    decision, staged = coordinator.decision(transaction), coordinator.staged(transaction)
    if decision.version < 0 and not staged:
        names = {each.transactional_id for each in coordinator.decisions()}
        raise UnknownTransaction(transaction=transaction, hint=nearest_hint(transaction, names))
    return decision, staged


@transactions.command(
    "list",
    examples=[
        ("Last decisions and staged rows", "kafkalog transactions list"),
    ],
)
@bootstrap_option
@json_option
def list_transactions(bootstrap: str, as_json: bool) -> None:
    """List the last decision of each transaction, and the staged rows on all brokers."""
    with _coordinator(bootstrap) as coordinator:
        decisions = coordinator.decisions()
        staged = coordinator.staged()
    columns = ["transaction", "batch", "state", "run", "partitions", "bytes", "age_seconds"]
    print_rows(_rows(decisions, staged), columns, as_json, "there are no transactions")


@transactions.command(
    "describe",
    examples=[
        ("One of the listed transactions", "kafkalog transactions describe 2f1c8a52-3f0d-4c4e-9d5b-7f2b1a9c0e11"),
    ],
)
@click.argument("transaction")
@bootstrap_option
@json_option
def describe(transaction: str, bootstrap: str, as_json: bool) -> None:
    """Describe TRANSACTION: its last decision, and its staged rows in each partition."""
    with _coordinator(bootstrap) as coordinator:
        decision, staged = _known(coordinator, transaction)
    described: dict[str, Any] = {
        "transaction": transaction,
        "version": decision.version,
        "decided": _row(decision, staged) if decision.batch_id >= 0 else None,
        "forgotten": decision.forgotten,
        "replaced_runs": list(decision.replaced_runs),
        "staged": [
            {
                "topic": each.topic,
                "partition": each.partition,
                "batch": each.batch_id,
                "state": "prepared" if each.commit_uuid else "staged",
                "commit": each.commit_uuid.hex(),
                "version": each.version,
                "parts": each.parts,
                "bytes": each.length,
                "age_seconds": _age(each.staged_us),
            }
            for each in staged
        ],
    }
    if as_json:
        print_json(described)
        return
    decided = described["decided"]
    if decision.forgotten:
        click.echo(f"transaction {transaction} was forgotten; its writes are counted under the next name since")
    elif decided is None:
        click.echo(f"transaction {transaction}: nothing is decided (version {decision.version})")
    else:
        by = f", by run {decided['run']}" if decided["run"] else ""
        click.echo(f"transaction {transaction}: batch {decided['batch']} is {decided['state']}{by}")
        for topic in decision.topics:
            ranges = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in topic.partitions)
            click.echo(f"  topic {topic.topic}, partitions {ranges}")
    if staged:
        columns = ["topic", "partition", "batch", "state", "version", "parts", "bytes", "age_seconds"]
        print_table(described["staged"], columns)


@transactions.command(
    "abort",
    examples=[
        ("Drop rows that are not decided", "kafkalog transactions abort 2f1c8a52-3f0d-4c4e-9d5b-7f2b1a9c0e11"),
    ],
)
@click.argument("transaction")
@bootstrap_option
def abort(transaction: str, bootstrap: str) -> None:
    """Drop the prepared rows of TRANSACTION that are not decided. A writer that still runs fails, unless it prepares
    them again before they are dropped: then they are listed as not yet given up, and it may commit them."""
    with _coordinator(bootstrap) as coordinator:
        _known(coordinator, transaction)
        given_up, kept = coordinator.abort(transaction)
    if given_up:
        size, where = sum(each.length for each in given_up), counted(len(given_up), "partition")
        click.echo(f"gave up what {where} had prepared of transaction {transaction}, {size} bytes")
    for each in kept:
        click.echo(
            f"not yet given up: what {TopicPartition(each.topic, each.partition)} has prepared, {each.length} bytes; "
            "its broker is applying another batch, or a writer has prepared it again: abort it once more"
        )
    if not given_up and not kept:
        click.echo(f"nothing of transaction {transaction} is prepared and undecided")


@transactions.command(
    "resolve",
    examples=[
        ("Append the decided batch", "kafkalog transactions resolve 2f1c8a52-3f0d-4c4e-9d5b-7f2b1a9c0e11"),
    ],
)
@click.argument("transaction")
@click.option("--accept-loss", is_flag=True, help="Mark the batch done even if staged rows are lost.")
@bootstrap_option
def resolve(transaction: str, accept_loss: bool, bootstrap: str) -> None:
    """Append the decided batch of TRANSACTION in every partition, and mark it done."""
    with _coordinator(bootstrap) as coordinator:
        _known(coordinator, transaction)
        decision, losses = coordinator.resolve(transaction, accept_loss)
    if decision.batch_id < 0:
        click.echo(f"nothing is decided of transaction {transaction}")
        return
    click.echo(f"batch {decision.batch_id} of transaction {transaction} is done")
    for loss in losses:
        click.echo(f"  lost: {loss}")


@transactions.command(
    "forget",
    examples=[
        ("In every topic", "kafkalog transactions forget nightly-load"),
        ("In one topic, in a script", "kafkalog transactions forget nightly-load flights --yes"),
    ],
)
@click.argument("app_id")
@click.argument("topic", default="")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation; required if stdin is not a terminal.")
@bootstrap_option
@json_option
def forget(app_id: str, topic: str, yes: bool, bootstrap: str, as_json: bool) -> None:
    """Forget which versions of APP_ID (a write's txnAppId) were written to TOPIC, or to any topic: the next version is
    written, whatever its number. Refused while a version is decided and not done."""
    from kafkalog.errors import InvalidArgument
    from kafkalog.format.numbered import parse

    with _coordinator(bootstrap) as coordinator:
        found = coordinator.recorded(app_id, topic)
        if not found:
            where = f" to topic '{topic}'" if topic else ""
            hint = _without_prefix(coordinator, app_id)
            raise InvalidArgument(
                reason=f"no writes of txnAppId '{app_id}'{where} are recorded; nothing is forgotten{hint}"
            )
        rows = []
        for decision in found:
            name = parse(decision.transactional_id)
            assert name is not None
            rows.append(
                {
                    "app_id": app_id,
                    "topic": name.topic,
                    "topic_id": name.topic_id.hex(),
                    "version": decision.batch_id,
                    "query": decision.query_id or None,
                    "transaction": decision.transactional_id,
                }
            )
        listed = ", ".join(f"version {row['version']} in topic {row['topic']}" for row in rows)
        confirm(f"forget that {app_id} wrote {listed}?", yes)
        coordinator.forget(found)
    if as_json:
        print_json(rows)
        return
    for row in rows:
        click.echo(f"forgot that {app_id} wrote version {row['version']} to topic {row['topic']}")


def _without_prefix(coordinator: TransactionCoordinator, given: str) -> str:
    """A hint with the argument to give, if `given` is a transactional id as `transactions list` shows it; else
    empty."""
    from kafkalog.format.numbered import PREFIX

    app_id = given.removeprefix(PREFIX).partition(":")[0]
    if not given.startswith(PREFIX) or not coordinator.recorded(app_id, ""):
        return ""
    return f"; in `kafkalog transactions list` it is {PREFIX}{app_id}:..., give '{app_id}'"


def _rows(decisions: list[Decision], staged: list[StagedSet]) -> list[dict[str, Any]]:
    """Rows of decisions by id, then of staged parts: prepared sets by their id, other parts by their producer's id."""
    rows = [_row(decision, staged) for decision in decisions if decision.batch_id >= 0]
    recorded = {decision.commit_uuid for decision in decisions}
    beside: dict[tuple[str, int, bytes], list[StagedSet]] = {}
    for each in staged:
        if not each.commit_uuid or each.commit_uuid not in recorded:
            name = each.transactional_id or f"producer {each.producer_id}"
            beside.setdefault((name, each.batch_id, each.commit_uuid), []).append(each)
    for (name, batch_id, commit_uuid), sets in sorted(beside.items()):
        rows.append(
            {
                "transaction": name,
                "batch": batch_id,
                "state": "prepared" if commit_uuid else "staged",
                "run": None,
                "query": None,
                "partitions": len({(each.topic_id, each.partition) for each in sets}),
                "bytes": sum(each.length for each in sets),
                "age_seconds": _age(max(each.staged_us for each in sets)),
            }
        )
    return rows


def _row(decision: Decision, staged: list[StagedSet]) -> dict[str, Any]:
    held = [each for each in staged if each.commit_uuid == decision.commit_uuid]
    return {
        "transaction": decision.transactional_id,
        "batch": decision.batch_id,
        "state": "done" if decision.done else "decided",
        "run": decision.run_id or None,
        "query": decision.query_id or None,
        "partitions": sum(len(topic.numbers()) for topic in decision.topics),
        "bytes": sum(each.length for each in held),
        "age_seconds": _age(decision.decided_us),
    }


def _age(since_us: int) -> int:
    return max(0, int(time.time() - since_us / 1e6))
