"""Text that anyone may have made, without what would steer a terminal."""


def printable(text: str, instead: str = "\N{REPLACEMENT CHARACTER}") -> str:
    """``text`` with ``instead`` for every character that does not print; a line break is one."""
    return "".join(c if c.isprintable() else instead for c in text)
