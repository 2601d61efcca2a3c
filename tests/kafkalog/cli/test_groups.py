"""`kafkalog groups`: what it prints and what it changes, against a running cluster."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from broker.local import LocalCluster
from kafkalog import Admin, Consumer, Producer, TopicPartition
from kafkalog.cli import groups
from kafkalog.cli.main import run
from kafkalog.client.cluster import Cluster
from kafkalog.client.groups import GroupMember, keep_member, lag, leave_group
from kafkalog.errors import GroupIsLive
from kafkalog.wire import broker_pb2 as pb
from tests.kafkalog.cli.command_line import Ran
from tests.waiting import waited_for

ME = GroupMember("me-1", "subscribe flights", "here", "")
Run = Callable[..., str]


@pytest.fixture
def admin(cluster: LocalCluster) -> Iterator[Admin]:
    with Admin(cluster.bootstrap_servers) as admin:
        yield admin


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Cluster]:
    client = Cluster(cluster.bootstrap_servers)
    yield client
    client.close()


@pytest.fixture
def made(
    admin: Admin, cluster: LocalCluster, new_topic: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """A topic of two partitions, ten and five records in them, a second apart from 1970 on; deleted at the end."""
    monkeypatch.setitem(os.environ, "KAFKALOG_BOOTSTRAP", cluster.bootstrap_servers)
    topic = new_topic()
    admin.create_topic(topic, partitions=2)
    with Producer(cluster.bootstrap_servers) as producer:
        for number in range(15):
            producer.send(topic, b"v", partition=number // 10, timestamp_us=number * 1_000_000)
    yield topic
    if topic in [each.name for each in admin.topics()]:
        admin.delete_topic(topic)


@pytest.fixture
def done(capfd: pytest.CaptureFixture[str]) -> Run:
    def done(*arguments: str, code: int = 0) -> str:
        """Its standard output, or what it failed with."""
        capfd.readouterr()
        ended = run(["groups", *arguments])
        written = capfd.readouterr()
        assert ended == code, written.err
        return written.err if code else written.out

    return done


def described(done: Run, group: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(done("describe", group, "--json"))
    return found


def test_lag_counts_what_the_log_still_has() -> None:
    assert lag(0, 10, 4) == 6
    assert lag(0, 10, None) == 10
    assert lag(5, 10, 2) == 5  # retention took three of them
    assert lag(5, 10, None) == 5
    assert lag(0, 10, 12) < 0  # the log was cut at its end
    assert lag(7, 7, None) == 0


def test_an_offset_beyond_the_end_is_said_and_no_lag_of_zero(
    topic: str, cluster: LocalCluster, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    group, where = f"{topic}.readers", TopicPartition(topic, 0)
    with Admin(cluster.bootstrap_servers) as admin:
        admin.commit(group, {where: 7})
    sentence = f"the group has committed offset 7 of {where}, which ends at 0"
    ran = Ran(capfdbinary, "groups", "describe", group)
    ran.fails_with(sentence)
    assert re.search(rf"^{re.escape(topic)} +0 +0 +0 +\d+ +7 +- ", ran.out, re.MULTILINE)
    ran = Ran(capfdbinary, "groups", "describe", group, "--json")
    [row, other] = json.loads(ran.out)["partitions"]
    assert ran.code == 1 and row["lag"] is None and sentence in row["error"]
    assert (other["lag"], other["error"]) == (0, None)
    ran = Ran(capfdbinary, "offsets", topic, "--group", group)
    ran.fails_with(sentence)


def test_a_group_is_listed_and_described_with_its_lag_and_its_members(
    admin: Admin, client: Cluster, made: str, done: Run
) -> None:
    group = made + ".g"
    assert group not in done("list")
    admin.commit(group, {TopicPartition(made, 0): 4})
    keep_member(client, group, ME, {TopicPartition(made, 0): 5})
    assert {"group": group, "kind": "stream", "topics": [made], "live_members": 1} in json.loads(done("list", "--json"))
    assert re.search(rf"^{re.escape(group)} +stream +1 +{re.escape(made)}$", done("list"), re.MULTILINE)
    found = described(done, group)
    assert (found["group"], found["lag"]) == (group, 10)
    sizes = [row.pop("size_bytes") for row in found["partitions"]]
    assert found["size_bytes"] == sum(sizes) and min(sizes) > 0
    moment = datetime.fromisoformat(found["partitions"][0].pop("committed_at"))
    assert abs((moment - datetime.now(moment.tzinfo)).total_seconds()) < 60
    assert found["lag_bytes"] == sum(row.pop("lag_bytes") for row in found["partitions"]) <= found["size_bytes"]
    common = {"topic": made, "start_offset": 0, "error": None, "owner": None, "lag_seconds": None}
    assert found["partitions"] == [
        {**common, "partition": 0, "end_offset": 10, "committed": 5, "lag": 5},
        {**common, "partition": 1, "end_offset": 5, "committed": None, "lag": 5, "committed_at": None},
    ]
    [member] = found["members"]
    assert (member["member"], member["host"], member["subscription"]) == ("me-1", "here", "subscribe flights")
    text = done("describe", group)
    assert re.search(rf"^{re.escape(made)} +0 +0 +10 +\d+ +5 +5 +\d+ +\S+$", text, re.MULTILINE)
    assert re.search(r"^lag 10 records, \d+ of \d+ bytes in the log$", text, re.MULTILINE)
    assert re.search(r"^me-1 +here +\S+ +subscribe flights$", text, re.MULTILINE)
    leave_group(client, group, "me-1")
    assert done("describe", group).endswith("\nkind stream, generation 2\nno live member\n")


def test_the_lag_in_bytes_and_seconds_begins_at_the_first_record_not_consumed(
    admin: Admin, cluster: LocalCluster, made: str, done: Run
) -> None:
    """Records of one batch, with timestamps of their own; of another one, a byte index further; and none."""
    zero, one = TopicPartition(made, 0), TopicPartition(made, 1)
    with Producer(cluster.bootstrap_servers) as producer:
        for second in (1_000, 1_001):
            value = os.urandom(100_000)
            producer.send(made, value, partition=1, timestamp_us=second * 1_000_000).result(60)
    for offset, seconds in ((4, 4), (0, 0), (9, 9)):
        admin.commit(made, {zero: offset, one: 5})
        found = json.loads(done("describe", made, "--seconds", "--json"))
        first, second = found["partitions"]
        now = time.time()
        assert 0 <= now - seconds - first["lag_seconds"] < 60
        assert 0 <= now - 1_000 - second["lag_seconds"] < 60
        assert 200_000 < second["lag_bytes"] < 210_000
        assert found["lag_bytes"] == first["lag_bytes"] + second["lag_bytes"] <= found["size_bytes"]
    admin.commit(made, {zero: 10, one: 6})
    first, second = json.loads(done("describe", made, "--seconds", "--json"))["partitions"]
    assert (first["lag_bytes"], first["lag_seconds"]) == (0, 0)
    assert 100_000 < second["lag_bytes"] < 110_000
    assert 0 <= time.time() - 1_001 - second["lag_seconds"] < 60
    assert "LAG SECONDS" in done("describe", made, "--seconds") and "LAG SECONDS" not in done("describe", made)


def test_a_member_that_waits_is_described_with_what_it_waits_for_and_its_group_is_neither_reset_nor_deleted(
    admin: Admin, cluster: LocalCluster, made: str, done: Run
) -> None:
    zero = TopicPartition(made, 0)
    settings = {"auto_offset_reset": "earliest", "enable_auto_commit": False}
    with (
        Consumer(cluster.bootstrap_servers, made, client_id="first", **settings) as first,
        Consumer(cluster.bootstrap_servers, made, client_id="second", group_instance_id="seat-2", **settings) as second,
    ):
        first.subscribe(made)
        messages = first.messages()
        while next(messages).partition != 1:  # it has a record of it in hand until it asks for the next one
            pass
        first.commit({zero: 3})
        second.subscribe(re.compile(re.escape(made)))
        waited_for(lambda: bool(described(done, made)["waits"]))
        found = described(done, made)
        names = [member["member"] for member in found["members"]]
        assert (found["kind"], found["generation"], found["assignor"]) == ("consumer", 2, "sticky")
        assert found["waits"] == [{"member": "seat-2", "owner": names[0], "partitions": {made: [1]}}]
        assert [row["owner"] for row in found["partitions"]] == [names[0]] * 2
        assert [(row["committed"], row["lag"]) for row in found["partitions"]] == [(3, 7), (None, 5)]
        mine, other = found["members"]
        assert names == [mine["member"], "seat-2"] and mine["member"].startswith("first-")
        assert (mine["client_id"], mine["group_instance_id"], mine["topics"]) == ("first", None, [made])
        assert (other["client_id"], other["group_instance_id"], other["pattern"]) == (
            "second",
            "seat-2",
            re.escape(made),
        )
        assert (mine["share"], mine["owned"]) == ({made: [0]}, {made: [0, 1]})
        assert (other["share"], other["owned"]) == ({made: [1]}, {})
        assert {"group": made, "kind": "consumer", "topics": [made], "live_members": 2} in json.loads(
            done("list", "--json")
        )
        text = done("describe", made)
        assert text.endswith(f"\nseat-2 waits for {made}:1, which {names[0]} still owns\n")
        assert "\nkind consumer, generation 2, assignor sticky\n" in text
        assert re.search(
            rf"^{re.escape(names[0])} +\S+ +first +- +\S+ +{re.escape(made)} +{re.escape(made)}:0-1$", text, re.M
        )
        says = done("reset", made, "--to", "earliest", code=1)
        assert f"group '{made}' has a live member" in says and "--wait" in says and "--force" not in says
        says = done("reset", made, "--to", "earliest", "--force", code=1)
        assert f"group '{made}' has a live member, {names[0]} on " in says and "stop it and try again" in says
        assert "--force does not help against consumers, which own the offsets" in says and "--wait" in says
        says = done("delete", made, "--yes", code=1)
        assert f"group '{made}' has a live member" in says and "overwrite" not in says
        assert admin.committed(made) == {zero: 3}
        del messages  # closed, so what it had in hand counts as handed back when more is asked for
        first.poll(0)
        waited_for(lambda: not described(done, made)["waits"])
        assert [row["owner"] for row in described(done, made)["partitions"]] == names


def test_only_the_first_live_member_s_offsets_are_written(admin: Admin, client: Cluster, made: str) -> None:
    group = made + ".g"
    other = GroupMember("me-2", "subscribe flights", "there", "")
    at = TopicPartition(made, 0)
    assert keep_member(client, group, ME, {at: 3}).first._replace(since_us=0, left_ms=0) == ME
    assert keep_member(client, group, other, {at: 9}).first.name == "me-1"
    assert admin.committed(group) == {at: 3}
    leave_group(client, group, "me-1")
    assert keep_member(client, group, other, {at: 9}).first.name == "me-2"
    assert admin.committed(group) == {at: 9}


def test_a_group_whose_topic_is_gone_says_so(admin: Admin, made: str, done: Run) -> None:
    admin.commit(made, {TopicPartition(made, 0): 4})
    admin.delete_topic(made)
    assert described(done, made)["partitions"] == []
    assert "has no offset in any topic that is there" in done("describe", made)
    assert "name one with --topic" in done("reset", made, "--to", "latest", code=1)


def test_a_topic_that_is_deleted_while_its_group_is_described_is_left_out(
    admin: Admin, made: str, done: Run, new_topic: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = new_topic()
    admin.create_topic(other, partitions=1)
    admin.commit(made, {TopicPartition(made, 0): 4, TopicPartition(other, 0): 0})
    describe_group = Admin.describe_group

    def and_then_deleted(asking: Admin, group: str) -> Any:
        found = describe_group(asking, group)
        admin.delete_topic(other)
        return found

    monkeypatch.setattr(Admin, "describe_group", and_then_deleted)
    assert {row["topic"] for row in described(done, made)["partitions"]} == {made}


def test_a_reset_writes_the_given_offsets(admin: Admin, made: str, done: Run) -> None:
    zero, one = TopicPartition(made, 0), TopicPartition(made, 1)
    admin.commit(made, {zero: 4})
    admin.delete_records({zero: 2})
    assert json.loads(done("reset", made, "--to", "latest", "--json")) == [
        {"topic": made, "partition": 0, "was": 4, "is": 10}
    ]
    for arguments, expected in (
        (("--to", "earliest"), {zero: 2}),
        (("--to-offset", "7"), {zero: 7}),
        (("--to-timestamp", "5000"), {zero: 5}),
        (("--to-timestamp", "1970-01-01T00:00:06"), {zero: 6}),
        (("--to-timestamp", "1970-01-01T01:00:07.5+01:00"), {zero: 8}),
        (("--to-timestamp", "2099-01-01"), {zero: 10}),  # nothing is as young: its end
        (("--to-offset", "3", "--topic", f"{made}:1"), {zero: 10, one: 3}),
        (("--to", "earliest", "--topic", made), {zero: 2, one: 0}),
        (("--to-offset", "4", "--topic", f"{made}:0,1"), {zero: 4, one: 4}),
    ):
        done("reset", made, *arguments)
        assert admin.committed(made) == expected, arguments
    assert re.search(rf"^{re.escape(made)} +0 +4 +10$", done("reset", made, "--to", "latest"), re.MULTILINE)


def test_a_group_is_shifted_as_far_as_the_log_goes(admin: Admin, made: str, done: Run) -> None:
    zero, one = TopicPartition(made, 0), TopicPartition(made, 1)
    admin.commit(made, {zero: 4, one: 4})
    admin.delete_records({zero: 2})
    for by, expected in (("-1", [3, 3]), ("2", [5, 5]), ("3", [8, 5]), ("-100", [2, 0])):
        rows = json.loads(done("reset", made, "--shift-by", by, "--json"))
        assert [row["is"] for row in rows] == expected
        assert admin.committed(made) == {zero: expected[0], one: expected[1]}
    admin.commit(made + ".one", {one: 4})
    says = done("reset", made + ".one", "--shift-by", "1", "--topic", made, code=1)
    assert f"group '{made}.one' has no offset in {zero} to shift from" in says
    assert admin.committed(made + ".one") == {one: 4}


def test_a_dry_run_shows_what_it_would_set_and_sets_nothing(
    admin: Admin, client: Cluster, made: str, capfd: pytest.CaptureFixture[str]
) -> None:
    zero = TopicPartition(made, 0)
    admin.commit(made, {zero: 4})
    for arguments, expected in ((["--shift-by", "2"], 6), (["--to", "latest"], 10), (["--to-offset", "3"], 3)):
        assert run(["groups", "reset", made, *arguments, "--dry-run", "--json"]) == 0
        shown = capfd.readouterr()
        assert json.loads(shown.out) == [{"topic": made, "partition": 0, "was": 4, "is": expected}]
        assert shown.err == f"nothing is set: this is what group {made} would get\n"
    keep_member(client, made, ME, {})
    assert run(["groups", "reset", made, "--to", "latest", "--dry-run"]) == 0
    assert "; me-1 is live: a reset is refused until it stops" in capfd.readouterr().err
    assert admin.committed(made) == {zero: 4}
    new = made + ".new"
    assert run(["groups", "reset", new, "--create", "--topic", made, "--to", "latest", "--dry-run"]) == 0
    assert new not in [group.name for group in admin.groups()]
    assert run(["groups", "reset", made, "--to-offset", "99", "--dry-run"]) == 1


def test_a_new_group_gets_its_first_offsets(admin: Admin, made: str, done: Run) -> None:
    zero, one = TopicPartition(made, 0), TopicPartition(made, 1)
    new = made + ".new"
    reset = ["reset", new, "--topic", made, "--to-timestamp", "4000"]
    says = done(*reset, code=1)
    assert f"there is no group '{new}'" in says and says.endswith("; for a new group, give --create\n")
    assert json.loads(done(*reset, "--create", "--json")) == [
        {"topic": made, "partition": 0, "was": None, "is": 4},
        {"topic": made, "partition": 1, "was": None, "is": 0},
    ]
    assert admin.committed(new) == {zero: 4, one: 0}
    assert "name one with --topic" in done("reset", new + "er", "--create", "--to", "latest", code=1)
    assert "is not a group name" in done("reset", "a/b", "--create", "--topic", made, "--to", "latest", code=1)


def test_a_group_is_deleted_unless_a_member_is_live(admin: Admin, client: Cluster, made: str, done: Run) -> None:
    zero, one = TopicPartition(made, 0), TopicPartition(made, 1)
    first, second = made + ".a", made + ".b"
    admin.commit(first, {zero: 4, one: 1})
    admin.commit(second, {one: 1})
    keep_member(client, first, ME, {zero: 5})
    says = done("delete", first, "--yes", code=1)
    assert f"group '{first}' has a live member, me-1 on here" in says and "--wait" not in says
    assert admin.committed(first) == {zero: 5, one: 1}
    leave_group(client, first, "me-1")
    assert done("delete", first, second, "--yes") == f"deleted group {first}\ndeleted group {second}\n"
    assert not {first, second} & {group.name for group in admin.groups()}
    assert f"there is no group '{first}'" in done("describe", first, code=1)
    assert f"there is no group '{first}'" in done("delete", first, "--yes", code=1)
    admin.commit(first, {zero: 2})  # as a Consumer that goes on
    assert admin.committed(first) == {zero: 2}


def test_a_reset_out_of_the_log_changes_nothing(admin: Admin, made: str, done: Run) -> None:
    zero, one = TopicPartition(made, 0), TopicPartition(made, 1)
    admin.commit(made, {zero: 4, one: 4})
    assert f"offset 8 of {made}-1 is outside [0, 5]" in done("reset", made, "--to-offset", "8", code=1)
    assert f"topic '{made}' has no partition 7" in done(
        "reset", made, "--to-offset", "1", "--topic", f"{made}:7", code=1
    )
    assert admin.committed(made) == {zero: 4, one: 4}


def test_a_live_member_is_not_overwritten_unless_forced(admin: Admin, client: Cluster, made: str, done: Run) -> None:
    zero = TopicPartition(made, 0)
    keep_member(client, made, ME, {zero: 5})
    says = done("reset", made, "--to", "earliest", code=1)
    assert f"group '{made}' has a live member, me-1 on here" in says and says.count("\n") == 1
    left_ms = int(re.findall(r"lease ends, in (\d+) ms at the latest", says)[0])
    assert 0 < left_ms <= 10_000 and "kafkalog groups reset --wait" in says and "--force" in says
    with pytest.raises(GroupIsLive):
        admin.reset_offsets(made, {zero: "earliest"})
    assert admin.committed(made) == {zero: 5}
    done("reset", made, "--to", "earliest", "--force")
    assert admin.committed(made) == {zero: 0}
    leave_group(client, made, "me-1")
    done("reset", made, "--to", "latest")
    assert admin.committed(made) == {zero: 10}


def test_wait_resets_once_the_member_has_left_and_says_for_whom_and_how_long(
    admin: Admin, client: Cluster, made: str, cluster: LocalCluster
) -> None:
    zero = TopicPartition(made, 0)
    keep_member(client, made, ME, {zero: 5})
    command = [sys.executable, "-m", "kafkalog.cli", "groups", "reset", made, "--to", "earliest", "--wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        said = process.stderr.readline()
        assert re.fullmatch(r"waiting for me-1 on here to leave, or for its lease to end at \d\d:\d\d:\d\d\n", said), (
            said
        )
        while not select.select([process.stderr], [], [], 0.2)[0]:
            keep_member(client, made, ME, {})
        assert process.stderr.readline() == "me-1 on here goes on and renews its lease: stop it\n"
        assert process.poll() is None and admin.committed(made) == {zero: 5}
        leave_group(client, made, "me-1")
        assert process.wait(60) == 0, process.stderr.read()
    assert admin.committed(made) == {zero: 0}


def test_wait_ends_with_the_lease_of_a_member_that_is_gone(admin: Admin, client: Cluster, made: str, done: Run) -> None:
    zero = TopicPartition(made, 0)
    admin.commit(made, {zero: 5})
    killed = pb.GroupMember(member="killed", topics=[made], session_timeout_ms=1000)
    client.call("JoinGroup", pb.JoinGroupRequest(group=made, member=killed, assignor="range"))
    done("reset", made, "--to", "latest", "--wait")
    assert admin.committed(made)[zero] == 10


def test_wait_says_once_whom_it_waits_for_and_once_that_one_continues(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = [("a", 10_000), ("a", 9_900), ("b", 200), ("a", 10_500), ("a", 10_500)]  # the second is no renewal
    now, pauses = 0.0, []

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        pauses.append(seconds)

    def reset_offsets(group: str, to: object, force: bool, create: bool) -> dict[TopicPartition, int]:
        if not looks:
            return {TopicPartition("t", 0): 7}
        member, left_ms = looks.pop(0)
        raise GroupIsLive(group=group, member=member, host="here", left_ms=left_ms)

    monkeypatch.setattr(groups, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    admin: Any = SimpleNamespace(reset_offsets=reset_offsets)
    assert groups._written(admin, "g", {}, force=False, wait=True) == {TopicPartition("t", 0): 7}
    assert [re.sub(r" to leave.*", "", line) for line in capsys.readouterr().err.splitlines()] == [
        "waiting for a on here",
        "waiting for b on here",
        "a on here goes on and renews its lease: stop it",
    ]
    assert pauses == [0.5, 0.5, 0.201, 0.5, 0.5]


def test_an_unknown_group_gets_the_nearest_name(admin: Admin, made: str, done: Run) -> None:
    admin.commit(made, {TopicPartition(made, 0): 4})
    for arguments in (["describe"], ["reset", "--to", "latest"]):
        says = done(arguments[0], made + "x", *arguments[1:], code=1)
        assert f"there is no group '{made}x'" in says and f"did you mean '{made}'?" in says
        assert ("--create" in says) == (arguments[0] == "reset")
    assert "'a/b' is not a group name" in done("describe", "a/b", code=1)


@pytest.mark.parametrize(
    "arguments",
    [
        ["describe"],
        ["reset", "g"],
        ["reset", "g", "--to", "latest", "--to-offset", "3"],
        ["reset", "g", "--to", "yesterday"],
        ["reset", "g", "--to", "latest", "--shift-by", "3"],
        ["reset", "g", "--to", "latest", "--wait", "--force"],
        ["reset", "g", "--to", "latest", "--dry-run", "--wait"],
        ["reset", "g", "--shift-by", "far"],
        ["delete", "--yes"],
        ["delete", "g"],
        ["reset", "g", "--to-offset", "-1"],
        ["reset", "g", "--to-timestamp", "noon"],
        ["reset", "g", "--to-timestamp", "1700000000"],  # in seconds: it would be January 20, 1970, and so the start
        ["reset", "g", "--to", "latest", "--topic", "t:x"],
        ["reset", "g", "--to", "latest", "--topic", ":1"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_2(arguments: list[str], done: Run) -> None:
    assert "Error: " in done(*arguments, code=2)


def test_a_reset_without_a_place_or_with_two_says_what_to_give(done: Run) -> None:
    assert "say where to: one of --to, --to-offset" in done("reset", "g", code=2)
    assert "give only one of --to, --to-offset" in done("reset", "g", "--to", "earliest", "--to-offset", "3", code=2)


def test_a_deletion_asks_about_the_groups_and_their_offsets(done: Run) -> None:
    assert "delete group a and its offsets?" in done("delete", "a", code=2)
    assert "delete groups a, b and their offsets?" in done("delete", "a", "b", code=2)


@pytest.mark.parametrize("command", [[], ["list"], ["describe"], ["reset"], ["delete"]], ids=" ".join)
def test_every_command_explains_itself(command: list[str], done: Run) -> None:
    assert done(*command, "--help").startswith("Usage: kafkalog groups")


def test_a_partition_that_is_not_served_is_named_and_the_group_described_without_it(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with LocalCluster(data=tmp_path) as running:
        monkeypatch.setenv("KAFKALOG_BOOTSTRAP", running.bootstrap_servers)
        with Admin(running.bootstrap_servers) as admin, Producer(running.bootstrap_servers) as producer:
            topic_id = admin.create_topic("t", partitions=2).topic_id
            producer.send("t", b"v", partition=0).result(60)
            admin.commit("readers", {TopicPartition("t", number): 0 for number in (0, 1)})
        [broker] = running.brokers
        broker.stop()
        shutil.rmtree(broker.data_directory / f"{topic_id.hex()}-1")
        broker.start()
        text = Ran(capfdbinary, "groups", "describe", "readers")
        told = Ran(capfdbinary, "groups", "describe", "readers", "--json")
    for ran in (text, told):
        assert ran.code == 1
        assert "partition t-1 is lost" in ran.err
    assert "\nlag 1 record, " in text.out
    found = json.loads(told.out)
    assert found["lag"] == 1
    assert [row["error"] is None for row in found["partitions"]] == [True, False]
