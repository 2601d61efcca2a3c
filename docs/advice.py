"""What to do about each error, by its code: docs/generate.py makes docs/reference/errors.md of it and of
`kafkalog/errors.py`. Codes stay when classes are renamed. A test finds an error without a row."""

from __future__ import annotations

NOTHING = "Nothing, if it passes: clients retry."

ADVICE = {
    1: "Read the sentence. A peer of a newer version may have sent an error that this version does not know.",
    10: "Create the topic (`kafkalog topics create`), or correct the name.",
    11: f"{NOTHING} The client looks the topic up again by its name.",
    12: "Name a partition that exists; `kafkalog topics describe` lists them.",
    13: f"{NOTHING} The client asks for the current leader.",
    14: f"{NOTHING} If it lasts, start the broker that it names.",
    15: "Use the topic as it is, or `kafkalog topics create --if-not-exists`.",
    16: "Choose another name.",
    17: "Give a number from 1 to `max.partitions.per.topic`. A topic can get more partitions, not fewer.",
    19: "Start more brokers, or create the topic with fewer replicas.",
    18: "Start a broker.",
    20: "Retention deleted the records, or the offset was never given out. Start at the earliest or latest offset "
    "(`auto.offset.reset`).",
    21: "Bytes on the disk changed. `kafkalog log verify PATH` lists the damage; see "
    "[damaged records](../how-to/recover.md#when-records-are-damaged).",
    22: "Set `committed.fallback`, or `auto.offset.reset` of a subscribed consumer. If the group has offsets in other "
    "partitions, `kafkalog groups reset --topic` sets one for this partition too.",
    24: "Find out why the records are gone, then decide on `failOnDataLoss=false`; see "
    "[records that are gone](spark-source.md#records-that-are-gone).",
    25: "Set `committed.fallback`, or set the group's offset with `kafkalog groups reset`.",
    26: "Correct the name; `kafkalog groups list` lists the groups. `kafkalog groups reset --create` makes a new one.",
    27: "Stop the query or the consumers first. `kafkalog groups reset --wait` waits until their leases have ended.",
    30: "Send smaller records, or raise the topic's `max.message.bytes`.",
    31: "Lower the producer's `batch.size`, or raise the topic's `max.message.bytes`.",
    32: "Lower `max.request.size`, or raise the broker's setting.",
    33: f"{NOTHING} The producer sends the missing batches again, in order.",
    34: "Another producer continued under this producer id, and this one is fenced. Use a new `Producer`.",
    35: "Use acks=0, acks=1 or acks=all.",
    36: "Send more slowly, or raise `buffer.memory` or `max.block.ms`.",
    37: "Look at the last failure in the sentence. The record may be in the log: reading shows it.",
    38: "Open a new one. A closed producer, consumer or admin cannot be used again.",
    39: "Read the topic to see whether the batch is there. Raise `producer.batches.remembered` if it happens again.",
    40: "Look at the disk, mount it again, then restart the broker; see "
    "[when a disk fails](../how-to/recover.md#when-a-disk-fails).",
    41: "Make room: writes continue by themselves. See "
    "[when a disk is full](../how-to/recover.md#when-a-disk-is-full).",
    42: "Two brokers were given one directory. Give each broker a `log.dir` of its own.",
    43: "The directory belongs to another cluster or broker. Correct `log.dir`, `broker.id` or `zookeeper.connect`.",
    44: f"{NOTHING} Otherwise raise the broker's limit of open files (`ulimit -n`).",
    50: "A client of another version, or a defect: report it with the sentence.",
    51: "Check the port: gRPC (9192) and data port (9193) speak different protocols. Use one version on both sides.",
    52: "Close connections that are not needed, or raise `max.connections`.",
    53: f"{NOTHING} The broker is being stopped.",
    54: "Start the broker, or correct the address. Give the gRPC port, not the data port.",
    55: f"{NOTHING} Otherwise look at ZooKeeper.",
    56: f"{NOTHING} Otherwise find out what keeps the broker busy, or raise `request.timeout.ms`.",
    57: "Stop the other process, or choose another port.",
    58: "A defect: report it with the traceback in the broker's log.",
    59: f"{NOTHING} Otherwise find out who calls so often.",
    60: "Correct the name. The sentence names the nearest one.",
    61: "Correct the value as the sentence says.",
    62: "Correct the call as the sentence says.",
    63: "Install what is missing; `kafkalog doctor` checks for all of it.",
    70: "Read the topic to see whether the records are there before you send them again.",
    90: "See [lost staged rows](../how-to/transactions.md#when-staged-rows-are-lost).",
    91: f"{NOTHING} The coordinator reads the decision again.",
    92: "Restore the newest checkpoint, or start with a new one; see "
    "[checkpoints](spark-sink.md#exactly-once-and-checkpoints).",
    93: "Nothing: a newer run of the query has taken over, and this one stops.",
    94: f"{NOTHING} The task sends the missing batches again, in order.",
    110: "Correct the rights or remove what has the file's name. The broker tries again every second, and serves the "
    "other logs.",
    111: "Give the write the query's own `checkpointLocation`; see "
    "[which query writes](spark-sink.md#which-query-writes).",
    120: "Put the disk or folder back and restart the broker, or give the records up; see "
    "[when a disk is lost](../how-to/recover.md#when-a-disk-is-lost).",
    121: "Nothing: the partition is served.",
    130: f"{NOTHING} The request is not executed later.",
    131: "Use fewer partitions in one topic or transaction, or shorter ids. A larger `jute.maxbuffer` changes nothing.",
    133: f"{NOTHING} The request is not executed later.",
    134: f"{NOTHING} If it lasts, look for members that join the group again and again.",
    135: f"{NOTHING} The member reads the new generation, and claims its share of that one.",
    140: "Use fewer producers at the same time, or raise `producer.state.max`.",
    150: "Give the write another `txnAppId`, or forget the count with `kafkalog transactions forget`.",
    151: "Write again: nothing of this write is in the topic.",
    152: "The sentence says whether the batch is decided. If it is, do not write the rows again; see "
    "[when a commit timed out](../how-to/transactions.md#when-a-commit-timed-out).",
    153: "Give each of the two writes a `txnAppId` of its own; see "
    "[one write of a version](spark-sink.md#one-write-of-a-version-in-each-run).",
    154: f"{NOTHING} Otherwise look at the broker and the disk that it names.",
    160: f"{NOTHING} Otherwise raise the limit of threads (`ulimit -u`, or a container's `pids.max`).",
    161: "Set a flag in the signal handler, and call `flush()` in the main program.",
    170: "Give the query a `checkpointLocation` of its own, or select the same topics again.",
    180: "Correct the id; `kafkalog transactions list` lists the transactions.",
    181: "Start the cluster again.",
    182: "Find out who wrote it, and put back what was there. The rest of the cluster is not affected.",
    190: "Stop the members, which `kafkalog groups describe` shows, or use another group. A subscribed consumer has "
    "waited 15 s already, as a Spark stream that has ended may count as a member for so long.",
    191: "Give all members of the group the same `partition.assignment.strategy`.",
    192: "A subscribed consumer joins again by itself. If it happens often, raise `session.timeout.ms`, or "
    "`max.poll.interval.ms` for an application that is slow.",
    193: "Give each process a `group.instance.id` of its own, and stop the one that is not to run.",
    194: "Nothing: the owner commits. Records after the last commit are handed out again, by the owner.",
    195: "Use another group, or `subscribe()` instead of `assign()`.",
    196: "Let the members subscribe to fewer partitions, or use several groups. A join may take half of the limit, "
    "because claims follow.",
    200: f"{NOTHING} The client sends again. If it lasts, start brokers, or lower the topic's `min.insync.replicas`; "
    "see [copies of partitions](../how-to/replicate.md).",
    201: f"{NOTHING} An idempotent producer sends again, and the batch is in the log once.",
    202: f"{NOTHING} The partition has another leader; the client asks for it.",
    203: f"{NOTHING} The broker learns of the election within moments.",
    204: f"{NOTHING} The new leader knows once its followers have asked it.",
    205: "Compare the two replicas (`kafkalog log dump`) before you stop one of them or remove its log.",
    206: "Look at `kafkalog cluster describe`, and name brokers that are live.",
    207: "Wait until the move is over, or cancel it first.",
    208: "Wait until a replica from before is in sync again (`kafkalog topics reassign --status`).",
    209: "Start or name more brokers, or ask for fewer copies: `kafkalog topics reassign --replication-factor`.",
    210: "Upgrade the older of the two. Clients and brokers speak several versions, so upgrade brokers before clients.",
    211: "Start the newer version of the broker again; see [upgrade](../OPERATIONS.md#upgrade).",
    214: f"{NOTHING} Between brokers only: the follower asks again.",
    213: "Records that were acknowledged and read are lost; see what readers have done with them. "
    "`auto.offset.reset=earliest` or `latest` reads on where the logs part.",
    212: "Upgrade the brokers that the sentence names, then raise the level again "
    "(`kafkalog cluster upgrade --dry-run` lists them).",
}
