"""Frees that wait: a block used on other streams is free only when what they had queued has run."""

from collections import deque
from collections.abc import Iterator

from kvlab.memory.allocator.pool import Block


class PendingFrees:
    """One queue of events for each stream; a block leaves when the last of its events has passed.

    Work does not run by itself here: ``finish`` says that everything queued on a stream so far has ended.
    """

    def __init__(self) -> None:
        self._queues: dict[int, deque[tuple[int, Block]]] = {}
        self._recorded: dict[int, int] = {}
        self._completed: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._queues)

    def wait(self, block: Block) -> None:
        """Put one event for the block on each stream that used it (``insert_events``)."""
        streams, block.stream_uses = block.stream_uses or set(), None
        for stream in streams:
            at = self._recorded[stream] = self._recorded.get(stream, 0) + 1
            block.pending_events += 1
            self._queues.setdefault(stream, deque()).append((at, block))

    def finish(self, stream: int) -> None:
        self._completed[stream] = self._recorded.get(stream, 0)

    def finish_all(self) -> None:
        for stream in self._queues:
            self.finish(stream)

    def pop_ready(self) -> Iterator[Block]:
        """The blocks that no longer wait for any stream (``process_events``)."""
        for stream, queue in list(self._queues.items()):
            done = self._completed.get(stream, 0)
            while queue and queue[0][0] <= done:
                _, block = queue.popleft()
                block.pending_events -= 1
                if block.pending_events == 0:
                    yield block
            if not queue:
                del self._queues[stream]

    def blocks(self) -> Iterator[Block]:
        return iter({id(block): block for queue in self._queues.values() for _, block in queue}.values())
