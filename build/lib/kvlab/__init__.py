"""kvlab: reproduce, read and fix the out-of-memory of a KV cache that meets a long sequence."""

__version__ = "0.1.0"
