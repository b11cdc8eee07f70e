"""In which order came what was there before a recording? Age breaks ties since torch 2.12; no snapshot tells it.

What the recording took out of equally large blocks tells it: the block it took was the older one.
"""

from heapq import heapify, heappop, heappush
from itertools import chain, takewhile

from kvlab.memory.allocator.core import CachingAllocator
from kvlab.memory.allocator.pool import Block, BlockPool

MOST_TIES = 16


class OrderOfAges:
    """Learns, one allocation after the other, an order of what ``restore`` numbered that explains them all."""

    def __init__(self) -> None:
        self._newest = 0
        self._waiting: dict[int, Block] = {}
        self._newer: dict[int, set[int]] = {}
        self._ages: dict[int, int] = {}  # by the number that `restore` gave
        self._given: dict[int, int] = {}  # and back

    def impose(self, allocator: CachingAllocator, waiting: dict[int, Block]) -> None:
        """Give what was just restored its ages. waiting: blocks, now and later, whose free is yet to complete; the
        allocator does not know them."""
        self._waiting = waiting
        if not self._ages:
            self._newest = allocator.next_age()
            self._ages = self._given = {age: age for age in range(1, self._newest + 1)}
        else:
            allocator.next_age()
            self._change(allocator, self._ages)

    def watch(self, allocator: CachingAllocator, pool: BlockPool, size: int, stream: int, address: int) -> None:
        """Before an allocation that the recording served at ``address``: make the model choose it too, if age
        alone decides and nothing learned forbids it."""
        free, place = pool.at_least(size, stream)
        if place == len(free):
            return
        ties = [entry[3] for entry in takewhile(lambda entry: entry[0] == free[place][0], free[place:])]
        taken = next((block for block in ties if block.address == address), None)
        if taken is None or not self._is_open(taken):
            return
        others = {self._given[b.age] for b in ties[:MOST_TIES] if self._is_open(b) and b.age != taken.age}
        known = self._newer.setdefault(self._given[taken.age], set())
        if ties[0] is not taken and (not self._is_open(ties[0]) or ties[0].age == taken.age):
            return
        new = others - known
        known |= new
        if ties[0] is not taken and not self._rank(allocator):
            known -= new

    def _is_open(self, block: Block) -> bool:
        return block.age <= self._newest

    def _rank(self, allocator: CachingAllocator) -> bool:
        """Sort the ages by what is known, else as they were; False where what is known contradicts itself."""
        waiting = dict.fromkeys(self._ages, 0)
        for newer in self._newer.values():
            for age in newer:
                waiting[age] += 1
        ready = [(self._ages[age], age) for age, count in waiting.items() if not count]
        heapify(ready)
        order: list[int] = []
        while ready:
            _, age = heappop(ready)
            order.append(age)
            for later in self._newer.get(age, ()):
                waiting[later] -= 1
                if not waiting[later]:
                    heappush(ready, (self._ages[later], later))
        if len(order) < len(self._ages):
            return False
        ranked = {age: place for place, age in enumerate(order, 1)}
        self._change(allocator, {self._ages[age]: ranked[age] for age in ranked})
        self._ages = ranked
        self._given = {new: age for age, new in ranked.items()}
        return True

    def _change(self, allocator: CachingAllocator, ages: dict[int, int]) -> None:
        """Give blocks other ages; an age that ``ages`` does not name stays."""
        for block in chain(allocator.blocks(), self._waiting.values()):
            block.age = ages.get(block.age, block.age)
        for pool in allocator.all_pools():
            pool.sort()
