"""Puts flights and planes into topics, for the jobs to work on: `python -m examples.publish_flights --help`.

Flights go to `flights` as JSON, keyed by carrier, in the order of their scheduled departures, which are the times of
their records; planes to `planes`, keyed by their tail numbers. Retention goes by when a record was appended, not by its
time, so records of 2013 are kept as long as all others.
"""

from __future__ import annotations

import argparse
import json
from datetime import datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.csv

from examples import demo
from kafkalog import Admin, Producer
from kafkalog.errors import BrokerUnreachable, TopicExists


def scheduled(flight: dict[str, Any]) -> datetime:
    return datetime.fromisoformat(flight["time_hour"]) + timedelta(minutes=flight["minute"])


def publish_flights(bootstrap: str, topic: str, flights: list[dict[str, Any]], partitions: int = 4) -> None:
    """A record's time is that of its flight's scheduled departure; it does not go back for a flight that comes late."""
    with Admin(bootstrap) as admin:
        admin.create_topic(topic, partitions=partitions)
    time_us = 0
    with Producer(bootstrap) as producer:
        for flight in flights:
            time_us = max(time_us, int(scheduled(flight).timestamp() * 1_000_000))
            producer.send(topic, json.dumps(flight).encode(), key=flight["carrier"].encode(), timestamp_us=time_us)


def read_planes() -> list[dict[str, Any]]:
    """Every plane as a dict of its columns."""
    options = pa.csv.ConvertOptions(strings_can_be_null=True)
    return pa.csv.read_csv(demo.flights_file().parent / "planes.csv", convert_options=options).to_pylist()


def publish_planes(bootstrap: str, topic: str, planes: list[dict[str, Any]], partitions: int = 2) -> None:
    with Admin(bootstrap) as admin:
        admin.create_topic(topic, partitions=partitions)
    with Producer(bootstrap) as producer:
        for plane in planes:
            producer.send(topic, json.dumps(plane).encode(), key=plane["tailnum"].encode())


def main() -> None:
    parser = argparse.ArgumentParser(description="Put flights out of New York in 2013, and planes, into topics.")
    parser.add_argument("--bootstrap", default="127.0.0.1:9192", help="host:port of a broker (default 127.0.0.1:9192)")
    parser.add_argument("--count", type=int, help="so many flights, the year's first (default all 336,776)")
    given = parser.parse_args()
    flights, planes = demo.read_flights()[: given.count], read_planes()
    try:
        publish_flights(given.bootstrap, "flights", flights)
        publish_planes(given.bootstrap, "planes", planes)
    except TopicExists as error:
        raise SystemExit(f"{error}; delete it (`kafkalog topics delete`) to publish once more") from None
    except BrokerUnreachable as error:
        raise SystemExit(f"{error}; `kafkalog local`, in another shell, starts a broker") from None
    print(f"{len(flights):,} flights are in the topic flights, {len(planes):,} planes in planes")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("interrupted") from None
