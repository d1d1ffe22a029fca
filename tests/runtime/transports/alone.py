"""Run a command in a network of its own, of nothing but loopback: python -m tests.runtime.transports.alone COMMAND...

For what cannot be kept from listening on every address. As root or, where the kernel permits it, as anybody.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import subprocess
import sys

SIOCSIFFLAGS = 0x8914
IFF_UP = 1
HERE = (sys.executable, "-m", "tests.runtime.transports.alone")
INSIDE = "--inside"


def is_alone() -> bool:
    return [name for _, name in socket.if_nameindex()] == ["lo"]


def is_permitted() -> bool:
    """Whether such a network can be had here."""
    try:
        return subprocess.run(command("true"), capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def command(*arguments: str) -> list[str]:
    return ["unshare", "-n" if os.geteuid() == 0 else "-rn", *HERE, INSIDE, *arguments]


def up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))


def main() -> None:
    if sys.argv[1] == INSIDE:
        up()
        os.execvp(sys.argv[2], sys.argv[2:])
    arguments = command(*sys.argv[1:])
    os.execvp(arguments[0], arguments)


if __name__ == "__main__":
    main()
