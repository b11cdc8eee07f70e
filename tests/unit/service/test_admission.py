"""The ledger of reservations: nothing is lost, nothing is given twice, and no tenant can take another's."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from kvlab.service.admission import Admission, NeverFits, QueueFull, Quota, QuotaError

TENANTS = {"a": Quota(100, 2), "b": Quota(60, 3), "c": Quota(30, 0)}
CAPACITY = 200


class Ledger(RuleBasedStateMachine):
    """Requests come, finish, leave the queue, and the engine dies and returns, in any order."""

    requests = Bundle("requests")

    def __init__(self):
        super().__init__()
        self.admission = Admission(CAPACITY, TENANTS)
        self.tokens: dict[int, tuple[str, int]] = {}
        self.running: set[int] = set()
        self.count = 0

    def started(self, ids: list[int]) -> None:
        assert not self.running & set(ids), "started twice"
        assert set(ids) <= set(self.tokens)
        self.running |= set(ids)

    @rule(target=requests, tenant=st.sampled_from(sorted(TENANTS)), tokens=st.integers(1, 120))
    def offer(self, tenant, tokens):
        self.count += 1
        before = (self.admission.free_tokens, self.admission.waiting())
        self.tokens[self.count] = tenant, tokens
        try:
            self.started(self.admission.offer(self.count, tenant, tokens))
        except (NeverFits, QueueFull):
            del self.tokens[self.count]
            assert (self.admission.free_tokens, self.admission.waiting()) == before
            return multiple()
        return self.count

    @rule(request=consumes(requests))
    def over(self, request):
        del self.tokens[request]
        self.running.discard(request)
        self.started(self.admission.release(request))

    @rule()
    def halt(self):
        self.admission.halt()

    @rule()
    def resume(self):
        self.started(self.admission.resume())

    @invariant()
    def reservations_and_free_are_the_capacity(self):
        reserved = sum(self.admission.reserved_tokens(tenant) for tenant in TENANTS)
        assert reserved + self.admission.free_tokens == CAPACITY

    @invariant()
    def a_tenants_reservation_is_what_its_running_requests_need_and_within_its_quota(self):
        for tenant, quota in TENANTS.items():
            needed = sum(self.tokens[request][1] for request in self.running if self.tokens[request][0] == tenant)
            assert self.admission.reserved_tokens(tenant) == needed <= quota.kv_tokens

    @invariant()
    def every_request_runs_or_waits(self):
        assert self.running | set(self.admission.waiting()) == set(self.tokens)
        assert not self.running & set(self.admission.waiting())

    @invariant()
    def no_queue_is_longer_than_its_places(self):
        waiting = [self.tokens[request][0] for request in self.admission.waiting()]
        assert all(waiting.count(tenant) <= quota.queue_places for tenant, quota in TENANTS.items())


TestLedger = Ledger.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_flood_of_one_tenant_leaves_the_others_their_whole_quota():
    admission = Admission(CAPACITY, TENANTS)
    for request in range(1000):
        try:
            admission.offer(request, "a", 10)
        except QueueFull:
            break
    assert admission.offer(2000, "b", 60) == [2000]
    assert admission.offer(2001, "c", 30) == [2001]


def test_without_quotas_the_same_flood_takes_everything():
    shared = {"all": Quota(CAPACITY, 1000)}
    admission = Admission(CAPACITY, shared)
    for request in range(100):
        admission.offer(request, "all", 10)
    assert admission.offer(2000, "all", 60) == []


def test_a_large_request_is_not_overtaken_by_smaller_ones_of_its_tenant():
    admission = Admission(100, {"a": Quota(100, 5)})
    assert admission.offer(1, "a", 60) == [1]
    assert admission.offer(2, "a", 90) == []
    assert admission.offer(3, "a", 10) == []
    assert admission.release(1) == [2, 3]


def test_who_leaves_the_queue_lets_the_next_one_in():
    admission = Admission(100, {"a": Quota(100, 5)})
    admission.offer(1, "a", 60)
    admission.offer(2, "a", 90)
    admission.offer(3, "a", 10)
    assert admission.release(2) == [3]


def test_a_refusal_names_the_numbers():
    admission = Admission(100, {"a": Quota(50, 0)})
    with pytest.raises(NeverFits, match=r"needs 51 tokens.*at most 50"):
        admission.offer(1, "a", 51)
    admission.offer(1, "a", 50)
    with pytest.raises(QueueFull, match="0 requests wait"):
        admission.offer(2, "a", 1)


def test_quotas_beyond_the_capacity_are_refused():
    with pytest.raises(QuotaError, match=r"110 .* 100"):
        Admission(100, {"a": Quota(60, 1), "b": Quota(50, 1)})
