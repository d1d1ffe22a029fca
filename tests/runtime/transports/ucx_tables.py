"""What UCX prints with UCX_PROTO_INFO=y: for each kind of operation a table of protocols by length, of which the last
column names the transports."""

from __future__ import annotations

import re

_READ_OF_GPU = re.compile(r"remote memory read .*into cuda.* from cuda")
_LENGTHS = re.compile(r"\d\S*")
_PROCESS = re.compile(r"\[(\S+:\d+)\s*:\d+\]")


def transports_of_reads(output: str) -> list[str]:
    """The transports column of each row of the tables for READs from a GPU's memory into a GPU's, in their order.

    Lines of several processes may alternate: the host's name and the pid stand before each.
    """
    found: list[str] = []
    in_table: dict[str, bool] = {}
    for line in output.splitlines():
        before, _, row = line.partition("|")
        process = match[1] if (match := _PROCESS.search(before)) else ""
        cells = [cell.strip() for cell in row.split("|")]
        if " by ucp_" in row:
            in_table[process] = bool(_READ_OF_GPU.search(row))
        elif in_table.get(process) and len(cells) >= 3 and _LENGTHS.fullmatch(cells[0]):
            found.append(cells[2])
    return found


def reads_by_cuda_ipc(output: str) -> bool:
    """True if there is a table for such READs, and all bytes of them move by cuda_ipc."""
    moving = [transports for transports in transports_of_reads(output) if transports]
    return bool(moving) and all("cuda_ipc" in transports for transports in moving)
