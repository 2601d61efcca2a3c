from __future__ import annotations

import pytest

from kafkalog.errors import ProtocolError
from kafkalog.wire.frames import HELLO_SIZE, VERSION, check_hello, hello


def test_only_this_version_of_the_data_port_is_spoken() -> None:
    assert len(hello()) == HELLO_SIZE
    assert check_hello(hello(), "here:1") == VERSION
    for version in (VERSION - 1, VERSION + 1):
        with pytest.raises(ProtocolError, match=f"here:1.*version {version}, this side {VERSION}"):
            check_hello(hello(version), "here:1")


def test_the_error_names_a_port_that_is_not_a_data_port() -> None:
    with pytest.raises(ProtocolError, match="not a kafkalog data port"):
        check_hello(b"HTTP/1.1", "here:1")
