"""Key/value caches; each one is a transformers ``Cache``."""
