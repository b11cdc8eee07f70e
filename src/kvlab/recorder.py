"""On an out-of-memory, keep what an engineer will wish they had."""
