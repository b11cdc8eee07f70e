"""Change the allocator's rules one at a time: for each change at least one test of the rules must fail."""

import importlib.util
import inspect
import sys
from importlib.abc import Loader, MetaPathFinder
from pathlib import Path

import pytest

import kvlab.memory.allocator

PACKAGE = kvlab.memory.allocator.__name__
SOURCES = Path(kvlab.memory.allocator.__file__).parent
RULES = Path(__file__).with_name("test_allocator_rules.py")

MUTATIONS = [
    # sizes
    ("sizes", "SMALL_REQUEST_BYTES = 1 * MIB", "SMALL_REQUEST_BYTES = 1 * MIB - 512"),
    ("sizes", "SMALL_SEGMENT_BYTES = 2 * MIB", "SMALL_SEGMENT_BYTES = 4 * MIB"),
    ("sizes", "LARGE_SEGMENT_BYTES = 20 * MIB", "LARGE_SEGMENT_BYTES = 16 * MIB"),
    ("sizes", "SEGMENT_GRAIN_BYTES = 2 * MIB", "SEGMENT_GRAIN_BYTES = MIB"),
    ("sizes", "return MIN_BLOCK_BYTES", "return 2 * MIN_BLOCK_BYTES"),
    ("sizes", "divisions > 1 and", "divisions > 0 and"),
    ("sizes", "requested_bytes > MIN_BLOCK_BYTES * divisions", "requested_bytes >= MIN_BLOCK_BYTES"),
    ("sizes", "power >> (divisions.bit_length() - 1)", "power >> divisions.bit_length()"),
    ("sizes", "block_bytes <= SMALL_REQUEST_BYTES", "block_bytes < SMALL_REQUEST_BYTES"),
    ("sizes", "block_bytes < OWN_SEGMENT_BYTES", "block_bytes <= OWN_SEGMENT_BYTES"),
    ("sizes", "size_bytes <= KIB", "size_bytes < KIB"),
    ("sizes", "size_bytes <= MIB", "size_bytes < MIB"),
    ("sizes", "size_bytes <= GIB", "size_bytes < GIB"),
    # pools and best fit
    ("core", "size <= SMALL_REQUEST_BYTES else large", "size < SMALL_REQUEST_BYTES else large"),
    ("core", "pool_id == DEFAULT_POOL else self.pools_of(pool_id)", "True else self.pools_of(pool_id)"),
    (
        "pool",
        "(block.size, block.age, block.address, block)",
        "(block.size, -block.age, block.address, block)",
    ),
    ("pool", "entry = (block.size, block.age, ", "entry = (-block.size, block.age, "),
    ("pool", "self._free.get(stream, [])", "next(iter(self._free.values()), [])"),
    ("core", 'if self.settings.tie_break == "address":', "if True:"),
    ("core", 'if self.settings.tie_break == "block_age" else', "if True else"),
    # splitting and merging
    ("core", "rest > SMALL_REQUEST_BYTES", "rest >= SMALL_REQUEST_BYTES"),
    ("core", "rest > SMALL_REQUEST_BYTES", "rest >= MIN_BLOCK_BYTES"),
    ("core", "return rest >= MIN_BLOCK_BYTES", "return rest > MIN_BLOCK_BYTES"),
    ("core", "return rest >= MIN_BLOCK_BYTES", "return rest > SMALL_REQUEST_BYTES"),
    ("core", "for neighbour in (block.prev, block.next):", "for neighbour in (block.prev,):"),
    ("core", "for neighbour in (block.prev, block.next):", "for neighbour in (block.next,):"),
    (
        "core",
        "neighbour.state == FREE and neighbour.mapped",
        "neighbour.state != ALLOCATED and neighbour.mapped",
    ),
    ("core", "neighbour.state == FREE and neighbour.mapped", "neighbour.state == FREE"),
    # giving back and retrying
    ("core", "            release_cached(self)\n            self.stats", "            self.stats"),
    ("core", "self.stats.num_alloc_retries += 1", "pass"),
    ("core", "self.stats.num_ooms += 1", "pass"),
    (
        "core",
        "            self.stats.num_alloc_retries += 1\n            block = self._grow(pool, size, tried, stream)",
        "            self.stats.num_alloc_retries += 1\n"
        "            block = self._find(pool, size, stream) or self._grow(pool, size, tried, stream)",
    ),
    ("reclaim", "for pool in (large, small):", "for pool in (small, large):"),
    ("reclaim", "block.expandable is None and not block.is_split", "block.expandable is None"),
    ("reclaim", "allocator.pending.finish_all()", "pass"),
    (
        "device",
        "if size_bytes > self.free_bytes:\n            return None",
        "if size_bytes >= self.free_bytes:\n            return None",
    ),
    ("device", "self.total_bytes - self.other_bytes - self.held_bytes", "self.total_bytes - self.held_bytes"),
    # limits
    (
        "core",
        "self.reserved_bytes + tried > self.limit_bytes",
        "self.reserved_bytes + tried >= self.limit_bytes",
    ),
    (
        "core",
        "self.reserved_bytes + tried > self.limit_bytes",
        "self.reserved_bytes + size > self.limit_bytes",
    ),
    ("core", "self.device.total_bytes + 0.5)", "self.device.total_bytes)"),
    ("core", "if fraction < 1 else None", "if fraction <= 1 else None"),
    ("core", "self.set_memory_fraction(settings.memory_fraction)", "self.set_memory_fraction(1.0)"),
    # max_split_size
    ("core", "return size < self.max_split and rest", "return rest"),
    ("core", "if block.size >= self.max_split:", "if block.size > self.max_split:"),
    ("core", "if size < self.max_split:", "if size <= self.max_split:"),
    (
        "core",
        "block.size >= size + self.settings.max_non_split_rounding_bytes",
        "block.size > size + self.settings.max_non_split_rounding_bytes",
    ),
    ("core", "elif block.size >= size + self", "elif False and size + self"),
    ("core", "if block is None and release_oversize(self, pool, size, stream):", "if False:"),
    ("reclaim", "for *_, block in reversed(free[:place]):", "for *_, block in free[:place]:"),
    ("reclaim", "released >= wanted or block", "block"),
    ("reclaim", "or block.size < allocator.max_split", "or False"),
    # garbage collection
    ("core", "            collect_garbage(self, self.limit_bytes)", "            pass"),
    ("core", "            pool.take_calls += 1", "            pass"),
    ("reclaim", ">= average]", "> 2 * average]"),
    ("reclaim", "while reclaimed < target and", "while"),
    # expandable segments
    ("expandable", "_reach(free[place + 1][3]) < _reach(free[place][3])", "False"),
    (
        "expandable",
        "start = before if before is not None and before.state == FREE else unmapped",
        "start = unmapped",
    ),
    ("expandable", "SMALL_SEGMENT_BYTES if pool.is_small else", "SMALL_SEGMENT_BYTES if False else"),
    (
        "expandable",
        "segment.page_above(block.address), segment.page_below",
        "segment.page_below(block.address), segment.page_below",
    ),
    ("expandable", "total + total // 8", "total // 8"),
    (
        "device",
        "        if size_bytes > self.free_bytes:\n            return False",
        "        if False:\n            return False",
    ),
    ("core", "return expandable.allocate(self, pool, size, stream)", "pass"),
    # streams
    ("core", "if stream != block.stream:", "if True:"),
    ("core", "        if block.stream_uses:\n", "        if False:\n"),
    ("streams", "if block.pending_events == 0:", "if True:"),
    ("streams", "queue[0][0] <= done", "queue[0][0] < done"),
    ("core", "        if self.pending:\n            self.complete_pending()", "        pass"),
    ("core", "(block.stream_uses or set()) | {stream}", "{stream}"),
    # messages
    ("messages", "format_size(tried_bytes)", "format_size(block_bytes)"),
    (
        "messages",
        "{_in_use(processes)}{_allowed(limit_bytes)}",
        "{_allowed(limit_bytes)}{_in_use(processes)}",
    ),
    ("messages", "in_use_bytes = allocated_bytes + private_pool_bytes", "in_use_bytes = allocated_bytes"),
    ("messages", 'fragmentation."\n    "  See', 'fragmentation."\n    " See'),
    ("messages", 'Management "\n    " (', 'Management "\n    "('),
    ("core", "1 << 60", "1 << 61"),
    # counters
    ("core", "if was_split:", "if not was_split:"),
    (
        "core",
        "        if block.is_split and block.expandable is None:\n            for",
        "        if False:\n            for",
    ),
    (
        "core",
        "if size >= self.max_split:\n            self.stats.oversize_allocations.increase",
        "if size > self.max_split:\n            self.stats.oversize_allocations.increase",
    ),
    ("core", "if tried >= self.max_split:", "if tried > self.max_split:"),
    ("stats", "self.peak = self.current\n", "self.peak = 0\n"),
    # settings
    ("settings", "table[last + 1 :]", "table[last:]"),
    ("settings", "table[:last] = [steps] * last", "pass"),
    ("settings", "min(_power_of_two(name, key), _HIGHEST_KEY_MB)", "_power_of_two(name, key)"),
    ("settings", "if number * MIB < LARGE_SEGMENT_BYTES:", "if number * MIB <= LARGE_SEGMENT_BYTES:"),
    ("settings", "if number * MIB <= OWN_SEGMENT_BYTES:", "if number * MIB < OWN_SEGMENT_BYTES:"),
    ("settings", "if not 0.0 < number < 1.0:", "if not 0.0 <= number <= 1.0:"),
]


class Mutant(MetaPathFinder, Loader):
    """Imports the allocator's package from its sources, one of them changed."""

    def __init__(self, module, old, new):
        self.changed = f"{PACKAGE}.{module}"
        text = (SOURCES / f"{module}.py").read_text()
        assert old in text, f"{module}.py no longer holds {old!r}"
        self.text = text.replace(old, new)

    def find_spec(self, name, path=None, target=None):
        if not (name == PACKAGE or name.startswith(PACKAGE + ".")):
            return None
        return importlib.util.spec_from_loader(name, self, is_package=name == PACKAGE)

    def exec_module(self, module):
        name = module.__name__.removeprefix(PACKAGE).removeprefix(".") or "__init__"
        text = self.text if module.__name__ == self.changed else (SOURCES / f"{name}.py").read_text()
        exec(compile(text, f"{name}.py", "exec"), module.__dict__)

    def failures(self):
        """The names of the rules' tests that fail on the changed package."""
        kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith(PACKAGE)}
        parent, attribute = sys.modules["kvlab.memory"], sys.modules["kvlab.memory"].allocator
        sys.meta_path.insert(0, self)
        try:
            rules = {"__name__": "rules"}
            exec(compile(RULES.read_text(), RULES.name, "exec"), rules)
            return [name for name, test in rules.items() if name.startswith("test_") and not passes(test)]
        finally:
            sys.meta_path.remove(self)
            for name in [name for name in sys.modules if name.startswith(PACKAGE)]:
                del sys.modules[name]
            sys.modules.update(kept)
            parent.allocator = attribute


def passes(test):
    assert not inspect.signature(test).parameters, "rules are tested without fixtures"
    try:
        test()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return False
    return True


@pytest.mark.parametrize(("module", "old", "new"), MUTATIONS, ids=[f"{m}: {n[:40]}" for m, _, n in MUTATIONS])
def test_a_changed_rule_turns_a_test_red(module, old, new):
    assert Mutant(module, old, new).failures()


def test_the_unchanged_rules_are_green():
    assert Mutant("sizes", "KIB = 1 << 10", "KIB = 1024").failures() == []
