"""The network interface over which NCCL connects its ranks: the one that has the address at which this rank listens.

Without NCCL_SOCKET_IFNAME, NCCL takes the first interface that it finds, which may be one that peers cannot reach, or
one that a cluster on loopback has no business on.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import struct
from array import array
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

VARIABLE: Final = "NCCL_SOCKET_IFNAME"
_SIOCGIFCONF: Final = 0x8912
_IFREQ_BYTES: Final = 40
_NAME_BYTES: Final = 16
_MOST_ADDRESSES: Final = 1024
_IPV6: Final = Path("/proc/net/if_inet6")


def follow_host(host: str) -> None:
    """Have NCCL use the interface that has the address of this host, unless the user has chosen one. To be called
    before the first group's id is made: NCCL looks at the variable then, once in a process."""
    if VARIABLE in os.environ:
        return
    name = interface_of(host)
    if name is None:
        log.warning("no interface has the address of %s: NCCL chooses one; set %s to name it", host, VARIABLE)
    else:
        os.environ[VARIABLE] = f"={name}"  # Without "=" it would also name all that begin so.


def interface_of(host: str) -> str | None:
    """Return the name of the interface that has an address of this host; None if there is none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    for *_, (text, *_) in found:
        address = ip_address(str(text).partition("%")[0])
        if address.is_loopback:  # lo reaches all of 127.0.0.0/8, and has one address of it.
            address = ip_address("127.0.0.1" if address.version == 4 else "::1")
        name = _with_ipv4(address) if isinstance(address, IPv4Address) else _with_ipv6(address)
        if name is not None:
            return name
    return None


def _with_ipv4(address: IPv4Address) -> str | None:
    """Ask the kernel for the names and addresses of all interfaces: ifreq structures, with a sockaddr_in in each."""
    buffer = array("B", bytes(_MOST_ADDRESSES * _IFREQ_BYTES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("iP", len(buffer), buffer.buffer_info()[0])
        nbytes: int = struct.unpack("iP", fcntl.ioctl(sock, _SIOCGIFCONF, request))[0]
    table = buffer.tobytes()
    for start in range(0, nbytes, _IFREQ_BYTES):
        at = start + _NAME_BYTES + 4
        if table[at : at + 4] == address.packed:
            # A second address of an interface may have a label, eth0:1.
            return table[start : start + _NAME_BYTES].split(b"\0")[0].decode().partition(":")[0]
    return None


def _with_ipv6(address: IPv6Address) -> str | None:
    if not _IPV6.exists():  # A kernel without IPv6.
        return None
    for line in _IPV6.read_text().splitlines():
        digits, *_, name = line.split()
        if bytes.fromhex(digits) == address.packed:
            return name
    return None
