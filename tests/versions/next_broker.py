"""A broker that pretends to be of the next version: `main` is that of `broker.__main__`.

It speaks and understands one more version of everything that is negotiated, adds a field to its registration and to the
states that it writes, and knows one more setting of topics. What the code reads at its import is replaced first.
"""

from __future__ import annotations

import sys
from typing import Any

from kafkalog import versions
from kafkalog.config import Setting, anything

NEXT = versions.VersionRange(1, 2)
SETTING = "next.setting"
FIELD = "next"
"""Of a registration and of a state: the id of the broker that wrote it first."""


def pretend() -> None:
    """Make this process one of the next version. To be called before anything else of kafkalog is imported."""
    late = [name for name in ("kafkalog.wire.frames", "kafkalog.zk.registry", "broker.config") if name in sys.modules]
    assert not late, f"{late} have this version's already"
    versions.PROTOCOL = versions.FORMATS = NEXT

    from broker import config

    class NextTopicSettings(config.TopicSettings, what="topic"):
        next_setting = Setting(int, 0, anything, "Has no effect.")

    config.TopicSettings = NextTopicSettings  # type: ignore[misc]

    from kafkalog.zk import content, registry

    def with_field(write: Any, unless: Any) -> Any:
        def written(record: Any) -> bytes:
            with content.fields_of("", write(record)) as fields:
                return content.to_json({FIELD: unless(record), **fields})

        return written

    registry._broker_content = with_field(registry._broker_content, lambda broker: broker.broker_id)
    registry._state_content = with_field(registry._state_content, lambda state: state.leader)


def main() -> int:
    pretend()

    from broker.__main__ import main as run

    return run()
