"""A small language for message formats: the message as it is printed, with `{name}` where a size stands.

- `{tried}`, `{free}`, ...: a size, its unit printed after it (bytes where none is);
- `{free:GiB}`: a number whose unit stands elsewhere in the message;
- `{tried:x}`: a size in the one-letter units of XLA (`21.95G`);
- `{tried:decimal}`: a size in units of 1000, unlike all others;
- `{n}`: any number; `{w}`: a word or nothing; `{*}`: up to 200 characters of anything; `{a|b}`: either text.

Literal text is matched without white space, quotes and case, as `text.squeeze` leaves it.
"""

import re
from fractions import Fraction
from functools import cache

from kvlab.memory.oom.model import Figures, Size
from kvlab.memory.oom.text import squeeze

# These programs divide by 1024, and some write GB or G for it.
UNIT_BYTES = {
    "": 1,
    "b": 1,
    "byte": 1,
    "bytes": 1,
    "k": 2**10,
    "kb": 2**10,
    "kib": 2**10,
    "m": 2**20,
    "mb": 2**20,
    "mib": 2**20,
    "g": 2**30,
    "gb": 2**30,
    "gib": 2**30,
    "t": 2**40,
    "tb": 2**40,
    "tib": 2**40,
    "pb": 2**50,
    "pib": 2**50,
    "eb": 2**60,
    "eib": 2**60,
}
DECIMAL_BYTES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}

_PLACEHOLDER = re.compile(r"\{([^{}]+)\}")
_NUMBER = r"(?<!\d)(?<!\d\.)(?<!\.\.)\d{1,24}(?:,\d{3}(?!\d)){0,6}(?:\.\d{0,12}|,\d{1,12})?"
_UNIT = r"(?:bytes?|[kmgtpe]i?b|[bkmgt](?![a-z0-9]))?"
_LETTER_UNIT = r"[kmgt]?i?b?"


@cache
def compiled(template: str) -> re.Pattern[str]:
    """The regular expression of a template, over squeezed text."""
    parts, position = [], 0
    for match in _PLACEHOLDER.finditer(template):
        parts.append(re.escape(squeeze(template[position : match.start()])))
        parts.append(_expression(match[1]))
        position = match.end()
    parts.append(re.escape(squeeze(template[position:])))
    return re.compile("".join(parts))


@cache
def anchor(template: str) -> str:
    """The literal text a template begins with, which finds it in a text without running its expression."""
    return squeeze(_PLACEHOLDER.split(template)[0])


def _expression(placeholder: str) -> str:
    if placeholder == "*":
        return ".{0,200}?"
    if placeholder == "n":
        return _NUMBER
    if placeholder == "w":
        return r"[\w.-]{0,32}"
    if "|" in placeholder:
        return "(?:" + "|".join(re.escape(squeeze(choice)) for choice in placeholder.split("|")) + ")"
    name, _, unit = placeholder.partition(":")
    if unit == "x":
        return f"(?P<{name}>{_NUMBER})(?P<{name}_unit>{_LETTER_UNIT})"
    if unit == "decimal":
        return f"(?P<{name}>{_NUMBER})(?P<{name}_decimal>[kmgt]?b)"
    if unit:
        return f"(?P<{name}_in_{unit.lower()}>{_NUMBER})"
    return f"(?P<{name}>{_NUMBER})(?P<{name}_unit>{_UNIT})"


def figures_of(match: re.Match[str]) -> Figures:
    """The sizes a match names."""
    sizes, found = {}, match.groupdict()
    for key, number in found.items():
        name, _, unit_elsewhere = key.partition("_in_")
        if decimal := found.get(f"{key}_decimal"):
            sizes[name] = _scaled(number, DECIMAL_BYTES[decimal])
        elif number and not key.endswith(("_unit", "_decimal")):
            sizes[name] = size(number, unit_elsewhere or found.get(f"{key}_unit") or "")
    return Figures(**sizes)


def size(number: str, unit: str) -> Size:
    """`round(number x unit)`, the unit as it is printed."""
    return _scaled(number, UNIT_BYTES[unit])


def _scaled(number: str, unit_bytes: int) -> Size:
    """A printed fraction may have been rounded by half of its last digit; whole bytes are exact."""
    number = re.sub(r",(?=\d{3}(?:\D|$))", "", number).replace(",", ".")
    decimals = len(number.partition(".")[2])
    exact = unit_bytes == 1 and not decimals
    return Size(round(Fraction(number) * unit_bytes), 0.0 if exact else 0.5 * 10**-decimals * unit_bytes)
