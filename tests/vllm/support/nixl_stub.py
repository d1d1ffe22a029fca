"""A NIXL that moves nothing: it notes what vLLM asks of it, and ends what the schedule says has ended.

It stands in for `NixlWrapper`. What an agent sends or posts lies in the `Wire` until the schedule delivers or ends it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from pdflow.protocol.values import Address


class NixlNotification:
    """A notification under way."""

    def __init__(self, sender: Address, target: Address, body: bytes) -> None:
        self.sender = sender
        self.target = target
        self.body = body


class Transfer:
    """A prepared WRITE or READ. `state` is what check_xfer_state says of it."""

    def __init__(self, initiator: Address, other: Address, ours: tuple[int, ...], theirs: tuple[int, ...], body: bytes):
        self.initiator = initiator
        self.other = other
        self.ours = ours
        self.theirs = theirs
        self.body = body
        self.state = "PROC"


class Wire:
    """All agents of one world, by their names, and what they have begun since somebody last looked."""

    def __init__(self) -> None:
        self.addresses: dict[str, Address] = {}
        self.inboxes: dict[Address, dict[str, list[bytes]]] = defaultdict(dict)
        self.names: dict[Address, str] = {}
        self.sent: list[NixlNotification] = []
        self.posted: list[Transfer] = []
        self.refuses: Address = ""
        """The agent whose next transfer is refused."""

    def join(self, agent: NixlStub, address: Address) -> None:
        agent.address = address
        self.addresses[agent.name] = address
        self.names[address] = agent.name

    def deliver(self, notification: NixlNotification) -> None:
        inbox = self.inboxes[notification.target]
        inbox.setdefault(self.names[notification.sender], []).append(notification.body)


class NixlStub:
    wire: Wire

    def __init__(self, name: str, _: Any = None) -> None:
        self.name = name
        self.address: Address = ""

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        return metadata.decode()

    def get_reg_descs(self, descs: Any, _: str) -> Any:
        return descs

    def get_xfer_descs(self, descs: Any, _: str) -> Any:
        return descs

    def register_memory(self, descs: Any, backends: Any = None) -> None:
        del descs, backends

    def prep_xfer_dlist(self, agent: str, descs: Any) -> str:
        """A handle is the name of the agent whose memory it describes."""
        del descs
        return agent

    def send_notif(self, agent: str, notif_msg: bytes) -> None:
        self.wire.sent.append(NixlNotification(self.address, self.wire.addresses[agent], notif_msg))

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        return self.wire.inboxes.pop(self.address, {})

    def make_prepped_xfer(
        self, operation: str, local: str, ours: Any, remote: str, theirs: Any, notif_msg: bytes
    ) -> Transfer:
        del operation, local
        other = self.wire.addresses[remote]
        return Transfer(self.address, other, tuple(map(int, ours)), tuple(map(int, theirs)), notif_msg)

    def transfer(self, handle: Transfer) -> str:
        if self.wire.refuses == self.address:
            self.wire.refuses = ""
            handle.state = "ERR"
            self.wire.posted.append(handle)
            raise RuntimeError("the schedule refuses this transfer")
        self.wire.posted.append(handle)
        return "PROC"

    def check_xfer_state(self, handle: Transfer) -> str:
        return handle.state

    def get_xfer_telemetry(self, handle: Transfer) -> Any:
        del handle

        class Telemetry:
            xferDuration = postDuration = totalBytes = descCount = 1  # noqa: N815 (NIXL's names)

        return Telemetry()

    def release_xfer_handle(self, handle: Transfer) -> None:
        del handle

    def release_dlist_handle(self, handle: str) -> None:
        del handle

    def remove_remote_agent(self, agent: str) -> None:
        del agent

    def deregister_memory(self, descs: Any) -> None:
        del descs

    def check_remote_metadata(self, agent: str) -> bool:
        return bool(agent)
