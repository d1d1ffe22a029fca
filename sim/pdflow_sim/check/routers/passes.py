"""Which attempts are passed over by the engines that they wait for (`pdflow.routing.passes`), counted without the
router."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

from pdflow.protocol.values import RequestId
from pdflow.routing.events import EnginesChecked

if TYPE_CHECKING:
    from pdflow_sim.check.routers.account import RouterAccount


class PassAccount:
    """The waits of open attempts, in the order in which they began, and how often each was passed over."""

    def __init__(self) -> None:
        self.order: tuple[RequestId, ...] = ()
        self.overtaken: frozenset[RequestId] = frozenset()
        """Those behind which one of the same kind has begun, at the same engine, that has ended since the last
        check."""
        self.passed: dict[RequestId, int] = {}

    def fork(self) -> PassAccount:
        other = PassAccount()
        other.order, other.overtaken, other.passed = self.order, self.overtaken, self.passed.copy()
        return other

    def fingerprint(self) -> Hashable:
        return self.order, self.overtaken, frozenset(self.passed.items())

    def begins(self, name: RequestId) -> None:
        """Record that an attempt waits for something new from now on."""
        self._drop(name)
        self.order += (name,)

    def ended(self, account: RouterAccount, name: RequestId) -> None:
        """Record that an attempt has got what it waited for."""
        if name in self.order:
            before = self.order[: self.order.index(name)]
            queue = account.waits_for(name), _gets_tokens(account, name)
            self.overtaken |= {
                each
                for each in before
                if (account.waits_for(each), _gets_tokens(account, each)) == queue and not _owes_whole(account, each)
            }

    def checked(self, account: RouterAccount, event: EnginesChecked) -> None:
        """Count a check for each attempt."""
        for name in self.order:
            seat, before = account.waits_for(name), self.passed.get(name, 0)
            if not _gets_tokens(account, name):
                self.passed[name] = before + (name in self.overtaken)
            elif name in event.quiet:
                self.passed[name] = before + (account.infos[seat].engine in event.active)
            else:
                self.passed[name] = 0
        self.overtaken = frozenset()

    def keep(self, account: RouterAccount) -> None:
        """Forget attempts that are over."""
        open_names = account.open_names()
        for name in self.order:
            if name not in open_names:
                self._drop(name)

    def _drop(self, name: RequestId) -> None:
        self.order = tuple(each for each in self.order if each != name)
        self.overtaken -= {name}
        self.passed.pop(name, None)


def _gets_tokens(account: RouterAccount, name: RequestId) -> bool:
    """Whether an attempt waits for further tokens, and not for its first answer."""
    (role, index), asked = account.waits_for(name), account.asked(name)
    answers = role == "decode" or asked.prefill_only or index in account.setting.aggregated
    return answers and account.legs[role, name].delivered and not _owes_whole(account, name)


def _owes_whole(account: RouterAccount, name: RequestId) -> bool:
    return account.owes_whole(account.asked(name), account.waits_for(name))
