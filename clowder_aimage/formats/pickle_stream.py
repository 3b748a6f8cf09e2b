"""Recognition of pickles by their opcodes. Nothing is unpickled.

Opcodes and their effect on the stack: Python, pickletools.
"""

from __future__ import annotations

import pickletools
import re
import warnings
from collections.abc import Iterator

# The opcode PROTO; its argument is the protocol. Protocols 0 and 1 have no such beginning.
_BEGINNING = re.compile(rb"\x80[\x02-\x05]", re.DOTALL)
# Opcodes that call a function or change an object, and those that import a module.
_CALLS = {"REDUCE", "BUILD", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX"}
_IMPORTS = {"GLOBAL", "STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4"}
# Opcodes after which random bytes are no longer taken for a pickle.
_ENOUGH = 3
# Of the error of pickletools for such an opcode.
_UNKNOWN = "unknown"


class _StackError(ValueError):
    """An opcode that takes more than the stack has."""


def is_pickle(start: bytes, *, is_whole: bool) -> bool:
    """Return True if a file begins with a pickle of any protocol.

    ``start`` is its first bytes, or all of it if ``is_whole``.
    """
    is_marked = _BEGINNING.match(start) is not None
    names: list[str] = []
    end = 0
    try:
        for name, position in _iter_opcodes(start):
            names.append(name)
            end = position + 1
    except ValueError as error:
        is_known = _UNKNOWN not in str(error)
        # Arrays of joblib follow the opcodes that describe them.
        if is_marked:
            return is_known or len(names) >= _ENOUGH
        is_cut = is_known and not is_whole and not isinstance(error, _StackError)
        return is_cut and len(names) >= _ENOUGH and not _CALLS.isdisjoint(names)
    is_value = is_whole and end == len(start) and len(names) >= _ENOUGH
    return is_marked or is_value or not (_CALLS | _IMPORTS).isdisjoint(names)


def _iter_opcodes(data: bytes) -> Iterator[tuple[str, int]]:
    """Yield the name and the position of each opcode of the first pickle.

    Raises ValueError: An opcode is unknown, lacks its argument, or takes more than the stack has.
    """
    # True for a mark, False for any other object.
    stack: list[bool] = []
    marks = 0
    with warnings.catch_warnings():
        # Escapes in texts of protocol 0 are deprecated in Python's source, too.
        warnings.simplefilter("ignore")
        for opcode, _, position in pickletools.genops(data):
            before = [item is pickletools.markobject for item in opcode.stack_before]
            # The number of objects, below the mark if the opcode takes all above one.
            count = next((below for below, is_mark in enumerate(before) if is_mark), len(before))
            if count < len(before):
                if not marks:
                    raise _StackError
                while not stack.pop():
                    pass
                marks -= 1
            if len(stack) < count:
                raise _StackError
            marks -= sum(stack[len(stack) - count :])
            del stack[len(stack) - count :]
            after = [item is pickletools.markobject for item in opcode.stack_after]
            stack += after
            marks += sum(after)
            yield opcode.name, position or 0
