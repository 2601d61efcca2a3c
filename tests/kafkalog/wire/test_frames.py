from __future__ import annotations

import pytest

from kafkalog.errors import NoCommonVersion, ProtocolError
from kafkalog.versions import PROTOCOL, VersionRange
from kafkalog.wire.frames import HELLO_SIZE, check_hello, hello


@pytest.mark.parametrize(
    ("theirs", "ours", "spoken"),
    [((1, 1), (1, 1), 1), ((1, 2), (1, 1), 1), ((1, 1), (1, 2), 1), ((1, 3), (2, 4), 3), ((2, 9), (5, 6), 6)],
)
def test_both_sides_speak_the_highest_version_that_both_know(
    theirs: tuple[int, int], ours: tuple[int, int], spoken: int
) -> None:
    client, server = VersionRange(*theirs), VersionRange(*ours)
    assert check_hello(hello(client), "here:1", server) == check_hello(hello(server), "here:1", client) == spoken


@pytest.mark.parametrize(
    ("theirs", "sentence"),
    [
        ((2, 3), "here:1 speaks the protocol versions 2 to 3, and this side 1: they have none in common"),
        ((0, 0), "here:1 speaks the protocol versions 0, and this side 1: they have none in common"),
    ],
)
def test_the_error_without_a_common_version_names_both_ranges(theirs: tuple[int, int], sentence: str) -> None:
    with pytest.raises(NoCommonVersion) as raised:
        check_hello(hello(VersionRange(*theirs)), "here:1", VersionRange(1, 1))
    assert str(raised.value) == sentence


def test_this_version_understands_itself() -> None:
    assert len(hello()) == HELLO_SIZE
    assert check_hello(hello(), "here:1") == PROTOCOL.newest


def test_the_error_names_a_port_that_is_not_a_data_port() -> None:
    with pytest.raises(ProtocolError, match="not a kafkalog data port"):
        check_hello(b"HTTP/1.1", "here:1")
