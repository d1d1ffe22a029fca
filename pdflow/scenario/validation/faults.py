"""The rules between the keys of a fault, and between a fault and the cluster: rules as in `validate`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pdflow.faults.names import matching
from pdflow.faults.plan import ROUTER
from pdflow.methods.catalogue import METHODS
from pdflow.scenario.plan import engines_of, links_of
from pdflow.scenario.reading.convert import Complaint, did_you_mean
from pdflow.scenario.reading.document import ScenarioTables
from pdflow.scenario.reading.locate import KeyPath
from pdflow.scenario.schema.faults import (
    CrashFault,
    DropFault,
    Fault,
    HandshakeErrorFault,
    HangUpFault,
    NicDownFault,
    OnLinks,
    OnMessages,
    PartitionFault,
    PauseFault,
    SkewFault,
    SlowFault,
    TransferErrorFault,
)
from pdflow.scenario.schema.network import Network
from pdflow.scenario.schema.scenario import Pool


def check_faults(tables: ScenarioTables, pools: Sequence[Pool] | None) -> Iterator[Complaint]:
    """Check all faults. `pools` is None if they are not all sound: then no name can be checked."""
    heal_s = tables.fault_table.heal_s if tables.fault_table is not None else None
    for index, fault in enumerate(tables.fault_list):
        if fault is None:
            continue
        path: KeyPath = ("fault", index)
        yield from _when(path, fault, heal_s)
        if isinstance(fault, CrashFault):
            transfer = tables.transfer
            strict = transfer is not None and METHODS[transfer.method].dialect(transfer.dialect).control_frames
            yield from _crash(path, fault, strict)
        if isinstance(fault, SkewFault) and fault.speed == 1.0 and fault.offset_s == 0.0:
            yield Complaint(path, "does not change the clock, expected speed, offset_s or both")
        if isinstance(fault, OnLinks):
            yield from _links(path, fault, pools, _reports(tables))
        if isinstance(fault, NicDownFault) and tables.network is not None:
            yield from _nic_down(path, fault, tables.network)
        if isinstance(fault, SlowFault):
            yield from _slow(path, fault, tables.network, pools)
        elif isinstance(fault, (CrashFault, NicDownFault, PauseFault, SkewFault)) and pools is not None:
            yield from _engine((*path, "engine"), fault.engine, engines_of(pools))


def _when(path: KeyPath, fault: Fault, heal_s: float | None) -> Iterator[Complaint]:
    drawn = isinstance(fault, (OnMessages, TransferErrorFault, HandshakeErrorFault))
    whenever = isinstance(fault, HangUpFault) and fault.within_s is not None
    if fault.rate_per_s is not None and fault.every_s is not None:
        yield Complaint((*path, "every_s"), "cannot be combined with rate_per_s; remove one of the two")
    elif fault.every_s is not None and fault.at_s is None:
        yield Complaint((*path, "every_s"), "needs at_s, the time of the first beginning")
    elif fault.at_s is None and fault.rate_per_s is None and not whenever:
        if not drawn:
            yield Complaint(path, "has no time, expected at_s or rate_per_s")
        elif not isinstance(fault, (OnMessages, TransferErrorFault, HandshakeErrorFault)) or fault.probability is None:
            yield Complaint(path, "has no time and no probability, expected probability, at_s or rate_per_s")
    if isinstance(fault, (CrashFault, HangUpFault)) and not whenever:
        if fault.for_s is not None:
            hint = " (did you mean restart_after_s?)" if isinstance(fault, CrashFault) else ""
            yield Complaint((*path, "for_s"), "has no effect: this kind acts at one instant" + hint)
    elif fault.for_s is None and (isinstance(fault, PauseFault) or fault.every_s or fault.rate_per_s):
        yield Complaint(path, "for_s is missing: the duration of each occurrence")
    if fault.every_s is not None:
        for key in ("for_s", "restart_after_s"):
            lasts = getattr(fault, key, None)
            if lasts is not None and lasts >= fault.every_s:
                yield Complaint((*path, key), f"is {lasts:g}, expected less than every_s, which is {fault.every_s:g}")
    if heal_s is not None and fault.at_s is not None and fault.at_s >= heal_s:
        yield Complaint((*path, "at_s"), f"is {fault.at_s:g}, expected less than faults.heal_s, which is {heal_s:g}")


def _crash(path: KeyPath, fault: CrashFault, strict: bool) -> Iterator[Complaint]:
    if fault.incarnation == "same":
        if strict:
            message = 'is "same", expected "new": in strict every restart has a new incarnation'
            yield Complaint((*path, "incarnation"), message)
        elif fault.engine_id == "new":
            yield Complaint((*path, "incarnation"), 'is "same", expected "new" with engine_id = "new"')
    if fault.every_s is not None and fault.restart_after_s is None:
        yield Complaint(path, "restart_after_s is missing: an engine that is down cannot crash again")


def _reports(tables: ScenarioTables) -> bool:
    """True if engines report to the router, as far as the sound tables show."""
    router, transfer = tables.router, tables.transfer
    return router is None or transfer is None or router.reports_every_s(transfer) is not None


def _links(path: KeyPath, fault: OnLinks, pools: Sequence[Pool] | None, reports: bool) -> Iterator[Complaint]:
    named: list[tuple[KeyPath, str]] = []
    if fault.between is not None:
        if fault.from_engine is not None or fault.to_engine is not None:
            yield Complaint(
                (*path, "between"),
                "cannot be combined with from or to; use between for both directions, from and to for one",
            )
            return
        if len(fault.between) != 2:
            yield Complaint((*path, "between"), f"names {len(fault.between)} engines, expected two")
            return
        named = [((*path, "between", i), pattern) for i, pattern in enumerate(fault.between)]
    for key, end in (("from", fault.from_engine), ("to", fault.to_engine)):
        if key == "to" and end == ROUTER:
            yield from _to_router((*path, key), fault, reports)
        elif end is not None:
            named.append(((*path, key), end))
    if pools is None:
        return
    known = engines_of(pools)
    found = [complaint for at, pattern in named for complaint in _engine(at, pattern, known)]
    yield from found
    if not found and not links_of(fault, pools):
        message = "these engines exchange nothing; expected a prefill and a decode engine"
        yield Complaint(named[0][0][: len(path) + 1] if named else path, message)


def _to_router(at: KeyPath, fault: OnLinks, reports: bool) -> Iterator[Complaint]:
    if not isinstance(fault, (DropFault, PartitionFault)):
        yield Complaint(at, "is the router, which only drop and partition can name: they lose heartbeats")
    elif not reports:
        yield Complaint(at, "is the router, but no engine sends heartbeats: set router.heartbeat_s")
    elif isinstance(fault, DropFault) and fault.messages:
        yield Complaint(
            (*at[:-1], "messages"), 'cannot be combined with to = "router", which receives heartbeats only; remove it'
        )


def _engine(at: KeyPath, pattern: str, known: Sequence[str]) -> Iterator[Complaint]:
    if matching(pattern, known):
        return
    if pattern == ROUTER:
        yield Complaint(at, "is the router, which this fault cannot affect; expected a prefill or decode engine")
        return
    names = ", ".join(known) if len(known) <= 8 else f"{known[0]}, ..., {known[-1]}"
    hint = did_you_mean(pattern, known)
    yield Complaint(at, f'is "{pattern}", expected an engine: {names}, or a pattern with *{hint}')


def _nic_down(path: KeyPath, fault: NicDownFault, network: Network) -> Iterator[Complaint]:
    count = network.nics_per_rank
    if count == 1:
        yield Complaint(
            path, 'each GPU has only one NIC; set network.nics_per_rank to 2 or more, or use kind = "partition"'
        )
    elif fault.nic >= count:
        yield Complaint(
            (*path, "nic"), f"is {fault.nic}, expected at most {count - 1}: network.nics_per_rank is {count}"
        )


def _slow(
    path: KeyPath, fault: SlowFault, network: Network | None, pools: Sequence[Pool] | None
) -> Iterator[Complaint]:
    if (fault.engine is None) == (fault.link is None):
        yield Complaint(path, "expected either engine or link: whose bandwidth is divided")
        return
    if fault.engine is not None and pools is not None:
        yield from _engine((*path, "engine"), fault.engine, engines_of(pools))
    if network is None:
        return
    if fault.link is not None:
        links = {link.name: link.bandwidth_bytes_per_s for link in network.links}
        if not matching(fault.link, links):
            known = ", ".join(links) or "none is defined"
            hint = did_you_mean(fault.link, links)
            yield Complaint((*path, "link"), f'is "{fault.link}", expected the name of a link: {known}{hint}')
        elif all(links[name] is None for name in matching(fault.link, links)):
            yield Complaint(
                (*path, "link"), f'is "{fault.link}", whose bandwidth is unlimited; set its bandwidth_bytes_per_s'
            )
    elif network.bandwidth_bytes_per_s is None:
        yield Complaint((*path, "engine"), "cannot be slowed: NICs are unlimited; set network.bandwidth_bytes_per_s")
