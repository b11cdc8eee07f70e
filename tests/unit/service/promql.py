"""Which metrics a PromQL expression reads: enough of its grammar for our own rules and panels."""

from __future__ import annotations

import re

_NOT_A_METRIC = re.compile(
    r"""
      "[^"]*"                                                      # strings
    | \{[^}]*\}                                                    # label matchers
    | \[[^\]]*\]                                                   # ranges
    | \b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)  # lists of labels
    | \b(?:offset\s+\S+|and|or|unless|bool|sum|count|min|max|avg)\b(?!\s*:)
    | [a-zA-Z_]\w*\s*(?=\()                                        # functions
    """,
    re.VERBOSE,
)
_METRIC = re.compile(r"[a-zA-Z_:][\w:]*")


def metrics_in(expression: str) -> set[str]:
    return set(_METRIC.findall(_NOT_A_METRIC.sub(" ", expression)))
