"""Ports to listen on, and errors in plain words if one is not available."""

from __future__ import annotations

import errno
import socket

from kafkalog.errors import AddressInUse, InvalidSetting


def bound_socket(host: str, port: int, setting: str) -> socket.socket:
    """A socket bound to an address, not listening yet.

    Args:
        setting: the port's, for the error.

    Raises:
        AddressInUse: something listens there already.
        InvalidSetting: the host is none of this machine's, or the port is not for everybody.
    """
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(address=f"{host}:{port}", setting=setting) from None
        if error.errno == errno.EACCES:
            raise InvalidSetting(name=setting, value=port, reason="ports this low require a privilege") from None
        if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
            reason = "it is not an address of this machine; to be found under another one, set advertised.host"
            raise InvalidSetting(name="host", value=host, reason=reason) from None
        raise
    return bound


def check_port_free(host: str, port: int, setting: str) -> None:
    """Raises as `bound_socket` does."""
    bound_socket(host, port, setting).close()


def free_port(host: str, setting: str) -> int:
    """A port that nothing listens on at the moment. Raises InvalidSetting."""
    with bound_socket(host, 0, setting) as probe:
        return int(probe.getsockname()[1])
