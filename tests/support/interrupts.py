"""Ctrl-C at a chosen place: raises an error where the interpreter would raise KeyboardInterrupt."""

import dis
import gc
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

_TOOL = 4
"""Number of this module for `sys.monitoring`, which gives numbers no meaning."""


class Striking:
    """Raises KeyboardInterrupt at the n-th place in these modules where a signal may arrive.

    Only in the thread that is inside `watching`, and only while `armed` is set.
    """

    def __init__(self, number: int, modules: Iterable[ModuleType]) -> None:
        self.armed = threading.Event()
        self.where = ""
        """The interrupted function, line and instruction; empty if there was no interrupt."""
        self._left = number
        self._files = frozenset(str(module.__file__) for module in modules)
        self._thread = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Interrupt the calls of this thread during the block."""
        self._thread = threading.get_ident()
        if sys.version_info >= (3, 12):
            with self._monitoring():
                yield
        else:
            sys.settrace(self._trace)
            try:
                yield
            finally:
                sys.settrace(None)

    def _strike(self, frame: FrameType, offset: int) -> None:
        if self.armed.is_set() and offset in _places(frame.f_code):
            self._left -= 1
            if self._left == 0:
                code = frame.f_code
                self.where = f"{code.co_name}, line {frame.f_lineno}, offset {offset}"
                raise KeyboardInterrupt(self.where)

    # --- Python 3.11 -------------------------------------------------------------------------

    def _trace(self, frame: FrameType, _event: str, _arg: Any) -> Any:
        if frame.f_code.co_filename not in self._files:
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self._within

    def _within(self, frame: FrameType, event: str, _arg: Any) -> Any:
        if event == "opcode":
            self._strike(frame, frame.f_lasti)
        return self._within

    # --- Python 3.12 and later, which cannot start to trace instructions of a running function ----

    if sys.version_info >= (3, 12):

        @contextmanager
        def _monitoring(self) -> Iterator[None]:
            events = sys.monitoring.events.INSTRUCTION
            codes = _codes(self._files)
            sys.monitoring.use_tool_id(_TOOL, "striking")
            try:
                sys.monitoring.register_callback(_TOOL, events, self._at)
                for code in codes:
                    sys.monitoring.set_local_events(_TOOL, code, events)
                yield
            finally:
                for code in codes:
                    sys.monitoring.set_local_events(_TOOL, code, 0)
                sys.monitoring.register_callback(_TOOL, events, None)
                sys.monitoring.free_tool_id(_TOOL)

        def _at(self, code: CodeType, offset: int) -> object:
            if offset not in _places(code):
                return sys.monitoring.DISABLE
            if threading.get_ident() == self._thread:
                self._strike(sys._getframe(1), offset)
            return None


@cache
def _places(code: CodeType) -> frozenset[int]:
    """Return the offsets of the instructions before which a signal may be handled.

    The interpreter checks for signals at the end of a call, of a backward jump, and of the first
    instruction. It raises there; here the following instruction raises, so only places count where
    both have the same handler.
    """
    found = set[tuple[int, int]]()
    before: dis.Instruction | None = None
    for one in dis.get_instructions(code):
        if before is not None and one.opname != "RESUME":
            found.add((before.offset, one.offset))
        checks = one.opname == "RESUME" or one.opname.startswith("CALL")
        before = one if checks else None
        if one.opname == "JUMP_BACKWARD":  # but not JUMP_BACKWARD_NO_INTERRUPT
            found.add((one.offset, one.argval))
    handlers = dis._parse_exception_table(code)  # type: ignore[attr-defined]

    def handler(offset: int) -> int | None:
        covering = (one.target for one in handlers if one.start <= offset < one.end)
        return next(covering, None)

    return frozenset(place for check, place in found if handler(check) == handler(place))


@cache
def _codes(files: frozenset[str]) -> list[CodeType]:
    """Return the code of every function of these files."""
    # conftest.py freezes the objects of the test collection, and frozen objects are not listed.
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    found = [one.__code__ for one in gc.get_objects() if isinstance(one, FunctionType)]
    if frozen:
        gc.freeze()
    codes = [code for code in found if code.co_filename in files]
    assert codes, files
    for code in codes:  # the list grows during the loop
        codes += [one for one in code.co_consts if isinstance(one, CodeType)]
    return codes
