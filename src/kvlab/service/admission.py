"""Who may start: a ledger of key/value tokens, and a bounded queue for each tenant. Pure: no clock, no process."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvlab.errors import KvlabError


class QuotaError(KvlabError, ValueError):
    """The tenants' quotas are together more than there is."""


class NeverFits(KvlabError):
    """The request needs more than its tenant can ever have."""

    def __init__(self, needed_tokens: int, quota_tokens: int):
        super().__init__(
            f"the request needs {needed_tokens} tokens of key/value cache, and at most {quota_tokens} can be had"
        )
        self.needed_tokens, self.quota_tokens = needed_tokens, quota_tokens


class QueueFull(KvlabError):
    """The tenant's queue has no free place."""

    def __init__(self, places: int):
        super().__init__(f"{places} requests wait already, which is all the places there are")


@dataclass(frozen=True)
class Quota:
    """What one tenant may hold at once, and how many of its requests may wait."""

    kv_tokens: int
    queue_places: int


@dataclass
class _Account:
    tenant: str
    quota: Quota
    reserved: int = 0
    waiting: "deque[tuple[int, int]]" = field(default_factory=deque)  # (request, tokens)


class Admission:
    """Reservations of key/value tokens, made before a request starts and given back when it is over.

    Quotas together are no more than the capacity, so what a tenant has not reserved of its own quota is always free,
    whatever the others do. Within a tenant the order is first come, first served: a large request is not overtaken
    by smaller ones until it starves.
    """

    def __init__(self, capacity_tokens: int, quotas: Mapping[str, Quota]):
        promised = sum(quota.kv_tokens for quota in quotas.values())
        if promised > capacity_tokens:
            raise QuotaError(
                f"the tenants' quotas are {promised} key/value tokens together, and the budget holds "
                f"{capacity_tokens}: lower the quotas, or raise the budget"
            )
        self.capacity_tokens = capacity_tokens
        self.free_tokens = capacity_tokens
        self._accounts = {tenant: _Account(tenant, quota) for tenant, quota in quotas.items()}
        self._held: dict[int, tuple[str, int]] = {}
        self._halted = False

    def offer(self, request: int, tenant: str, tokens: int) -> list[int]:
        """Take a request in; returns the requests that may start now, this one among them or not yet.

        Raises NeverFits and QueueFull, which leave everything as it was.
        """
        account = self._accounts[tenant]
        if tokens > account.quota.kv_tokens:
            raise NeverFits(tokens, account.quota.kv_tokens)
        if not self._fits(account, tokens) and len(account.waiting) >= account.quota.queue_places:
            raise QueueFull(account.quota.queue_places)
        account.waiting.append((request, tokens))
        return self._start([account])

    def release(self, request: int) -> list[int]:
        """A request is over, or has left the queue; returns the requests that may start now."""
        if request not in self._held:
            return self._leave_queue(request)
        tenant, tokens = self._held.pop(request)
        self._accounts[tenant].reserved -= tokens
        self.free_tokens += tokens
        return self._start([self._accounts[tenant]])

    def halt(self) -> None:
        """Start nothing until ``resume()``."""
        self._halted = True

    def resume(self) -> list[int]:
        """Start again; returns the requests that may start now."""
        self._halted = False
        return self._start(self._accounts.values())

    def waiting(self) -> list[int]:
        """The requests that wait, tenant by tenant."""
        return [request for account in self._accounts.values() for request, _ in account.waiting]

    def reserved_tokens(self, tenant: str) -> int:
        return self._accounts[tenant].reserved

    def quota(self, tenant: str) -> Quota:
        return self._accounts[tenant].quota

    def _fits(self, account: _Account, tokens: int) -> bool:
        return not (self._halted or account.waiting) and tokens <= account.quota.kv_tokens - account.reserved

    def _start(self, accounts: Iterable[_Account]) -> list[int]:
        started = []
        for account in accounts if not self._halted else ():
            while account.waiting and account.waiting[0][1] <= account.quota.kv_tokens - account.reserved:
                request, tokens = account.waiting.popleft()
                account.reserved += tokens
                self.free_tokens -= tokens
                self._held[request] = account.tenant, tokens
                started.append(request)
        return started

    def _leave_queue(self, request: int) -> list[int]:
        for account in self._accounts.values():
            left = deque(entry for entry in account.waiting if entry[0] != request)
            if len(left) < len(account.waiting):
                account.waiting = left
                return self._start([account])
        return []
