"""Read a pickle of plain data; one that could look up a class, or call anything, is refused unread.

A snapshot is made of dictionaries, lists, tuples of numbers, strings, numbers, booleans and None. Two
locks: the whole file must first match a grammar of the instructions that build these, and the unpickler
that then reads it has no way to find a class.
"""

import io
import pickle
import re
from typing import Any

from kvlab.errors import KvlabError


class PlainPickleError(KvlabError, ValueError):
    """The bytes are no pickle, a damaged one, one that asks for more than plain data, or too large."""


def load_plain(data: bytes, *, max_containers: int) -> Any:
    """The object that the pickle ``data`` (protocol 0 to 5) describes.

    Memory stays below about 16 bytes for each byte of ``data`` and 250 for each of the ``max_containers``
    lists and dictionaries. Raises PlainPickleError for anything but a whole pickle of plain data.
    """
    _require_plain(data)
    if _containers_at_most(data) > max_containers:
        raise PlainPickleError(f"the pickle may hold more than {max_containers:,} lists and dictionaries")
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except PlainPickleError:
        raise
    except _DAMAGE as error:
        raise PlainPickleError(f"the pickle is damaged ({type(error).__name__})") from None


def _require_plain(data: bytes) -> None:
    """Match every byte against the grammar; long texts, which it leaves out, are stepped over here."""
    at = 2 if data[:1] == b"\x80" and data[1:2] <= b"\x05" else 0
    while True:
        at = _PLAIN.match(data, at).end()
        op = data[at : at + 1]
        if op == b"X":
            at += 5 + int.from_bytes(data[at + 1 : at + 5], "little")
        elif op == b"\x8d":
            at += 9 + int.from_bytes(data[at + 1 : at + 9], "little")
        elif op == b"." and at + 1 == len(data):
            return
        elif op in _ASKS_FOR_MORE and op:
            raise PlainPickleError(_REFUSAL)
        else:
            raise PlainPickleError(f"no pickle of plain data, or one cut short or damaged at byte {at}")
        if at >= len(data):
            raise PlainPickleError("the pickle is cut short")


def _containers_at_most(data: bytes) -> int:
    """An upper bound: bytes inside numbers and texts are counted too."""
    return data.count(b"}") + data.count(b"]") + min(data.count(b"("), data.count(b"d") + data.count(b"l"))


_DAMAGE = (
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    TypeError,
    ValueError,
)
"""What the unpickler raises over instructions that are each plain but make no sense together."""


class _Unpickler(pickle.Unpickler):
    """The second lock: no class, no persistent id, no buffer."""

    def find_class(self, module: str, name: str) -> Any:
        raise PlainPickleError(_REFUSAL)

    def persistent_load(self, pid: Any) -> Any:
        raise PlainPickleError(_REFUSAL)


_REFUSAL = "the pickle asks for a class or a call; a snapshot holds plain data only, so it was not read"


def _sized(head: bytes, tail: bytes, sizes: range) -> bytes:
    """An instruction whose first argument byte says how many bytes follow (with ``tail`` in between)."""
    followed = (re.escape(bytes((n,))) + tail + b".{%d}" % n for n in sizes)
    return head + b"(?:" + b"|".join(followed) + b")"


# A memo index below 2^24 keeps the unpickler's memo, an array, below 256 MiB. Tuples may hold whole numbers
# only: a deeply nested tuple as a key would overflow the C stack when it is hashed.
_INTEGER = b"(?:K.|J.{4}|M..|" + _sized(rb"\x8a", b"", range(17)) + rb"|I-?\d{1,40}\n|L-?\d{1,40}L?\n)"
_PLAIN = re.compile(
    b"(?s:"
    + b"|".join(
        (
            rb"\((?:" + _INTEGER + b")*+t",  # TUPLE
            b"h.",  # BINGET
            rb"\x94",  # MEMOIZE
            b"q.",  # BINPUT
            _INTEGER + rb"(?:\x85|" + _INTEGER + rb"(?:\x86|" + _INTEGER + rb"\x87)?)?",
            b"[(}u]",  # MARK, EMPTY_DICT, SETITEMS
            rb"[\]e]",  # EMPTY_LIST, APPENDS
            rb"j.{4}",  # LONG_BINGET
            rb"r.{3}\x00",  # LONG_BINPUT
            b"[dlas]",  # DICT, LIST, APPEND, SETITEM
            _sized(rb"\x8c", b"", range(256)),  # SHORT_BINUNICODE
            _sized(b"X", rb"\x00\x00\x00", range(256)),  # BINUNICODE
            rb"G.{8}",  # BINFLOAT
            rb"[N\x88\x89)]",  # NONE, NEWTRUE, NEWFALSE, EMPTY_TUPLE
            rb"\x95.{5}\x00{3}",  # FRAME
            rb"V[^\n]*\n",  # UNICODE
            rb"F[-+.\dA-Za-z]{1,40}\n",  # FLOAT
            rb"[pg]\d{1,7}\n",  # PUT, GET
        )
    )
    + b")*+"
)
_ASKS_FOR_MORE = b"ciobRPQ\x81\x82\x83\x84\x92\x93\x97\x98"
"""GLOBAL, INST, OBJ, BUILD, REDUCE, PERSID, BINPERSID, NEWOBJ, EXT1-4, NEWOBJ_EX, STACK_GLOBAL, buffers."""
