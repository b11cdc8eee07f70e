"""Where the bytes go: arithmetic, messages, snapshots and a model of the allocator."""
