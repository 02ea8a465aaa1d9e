"""Child processes that tests can kill, starve and inject faults into.

A small process with everything imported forks one child for each run, so that a run takes
milliseconds and makes no unrelated system calls. A child talks over a socket, because `write`
belongs to the store.
"""

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from stenolog.stores.sqlite import connections
from support.crash import child_roles
from support.crash.workload import Line, Run, decode_lines, encode_line

TESTS: Final = Path(__file__).resolve().parents[2]
_PR_SET_PTRACER: Final = 0x59616D61
_MESSAGE: Final = 1 << 16


class Child:
    """A forked run that waits for `go`, then sends lines until it ends or dies."""

    def __init__(self, pid: int, channel: socket.socket, reap: Callable[[int], int]) -> None:
        self.pid = pid
        self._channel = channel
        self._reap = reap
        self._received = b""
        self._ended = False

    def go(self) -> None:
        """Let the child start."""
        self._channel.send(b"g")

    def lines(self) -> list[Line]:
        """Return the lines received so far."""
        return decode_lines(self._received)

    def poll(self) -> bool:
        """Receive without waiting; return whether more can come."""
        while not self._ended:
            try:
                part = self._channel.recv(_MESSAGE, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return True
            except ConnectionResetError:
                part = b""
            self._received += part
            self._ended = not part
        return False

    def words(self) -> int:
        """Return the number of lines received so far."""
        return self._received.count(b"\n")

    def said(self, word: str) -> int:
        """Return how many lines with this word were received so far."""
        return self._received.count(b'"%s"' % word.encode())

    def until(self, reached: Callable[[bytes], bool], *, seconds: float = 30) -> bool:
        """Receive until a condition holds, polling closely; False if the child ended before."""
        limit = time.monotonic() + seconds
        while self.poll():
            if reached(self._received):
                return True
            if time.monotonic() > limit:
                raise TimeoutError(f"child {self.pid} said nothing new for too long")
        return reached(self._received)

    def finish(self, *, seconds: float = 30) -> int:
        """Wait for the end and return the exit status.

        Kills a child that hangs and raises TimeoutError.
        """
        limit = time.monotonic() + seconds
        hung = False
        while self.poll():
            if time.monotonic() > limit:
                hung = True
                self.kill()
            select.select([self._channel], [], [], 0.2)
        status = self._reap(self.pid)
        self._channel.close()
        if hung:
            said = self.lines()[-1:]
            raise TimeoutError(f"child {self.pid} hung for {seconds} s, its last line was {said}")
        return status

    def close(self) -> None:
        """Close the socket."""
        self._channel.close()

    def kill(self) -> None:
        """Kill the child with SIGKILL."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


class Nursery:
    """Creates children; as a context manager it ends all of them."""

    def __init__(self, *, env: Mapping[str, str] | None = None) -> None:
        self._line, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._complaints = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed at exit
        path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
        with other:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "support.crash.child_processes", str(other.fileno())],
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                stderr=self._complaints,
                env={**os.environ, "PYTHONPATH": path, **(env or {})},
            )
        self._children: list[Child] = []

    def child(self, role: str, **options: Any) -> Child:
        """Create a child that runs this role (a function of `child_roles`) after `go`."""
        near, far = socket.socketpair()
        with far:
            request = json.dumps([role, options], default=str).encode()
            socket.send_fds(self._line, [request], [far.fileno()])
        child = Child(int(self._answer()), near, self._reap)
        self._children.append(child)
        return child

    def _reap(self, pid: int) -> int:
        self._line.send(b"%d" % pid)
        self._children = [child for child in self._children if child.pid != pid]
        return int(self._answer())

    def _answer(self) -> bytes:
        self._line.settimeout(60)
        answer = self._line.recv(100)
        if not answer:
            self._complaints.seek(0)
            raise RuntimeError(f"the nursery died: {self._complaints.read()}")
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for child in self._children:
            child.kill()
            child.close()
        self._line.close()
        self._server.wait(30)
        self._complaints.close()


# --- server side -----------------------------------------------------------------------------


def _serve(line: socket.socket) -> None:
    while True:
        request, fds, _, _ = socket.recv_fds(line, _MESSAGE, 1)
        if not request:
            return
        if fds:
            pid = os.fork()
            if pid == 0:
                _play(line, socket.socket(fileno=fds[0]), *json.loads(request))
            os.close(fds[0])
            line.send(b"%d" % pid)
        else:
            _, status = os.waitpid(int(request), 0)
            line.send(b"%d" % os.waitstatus_to_exitcode(status))


def _play(line: socket.socket, channel: socket.socket, role: str, options: dict[str, Any]) -> None:
    code = 1
    try:
        line.close()
        # If only ancestors may trace, strace is not allowed to; let every process trace.
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(-1 & (2**64 - 1)), 0, 0, 0)
        for name, text in options.pop("env", {}).items():
            os.environ[name] = text
        if "file_size" in options:
            limit = options.pop("file_size")
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        if options.pop("never_sync", False):
            os.fsync = _no_sync
            os.fdatasync = _no_sync
            connections.SYNCHRONOUS_LEVELS["full"] = "OFF"
        if channel.recv(1):
            child_roles.ROLES[role](channel, **options)
        code = 0
    except BaseException:  # noqa: BLE001 - told, before the child ends here
        channel.sendall(encode_line(Line("BUG", result=traceback.format_exc())))
    finally:
        os._exit(code)


def _no_sync(fd: object) -> None:
    """Do nothing, as a store without sync."""


def _warm_up() -> None:
    """Do everything that is imported or read on first use, so that children do not repeat it."""
    with tempfile.TemporaryDirectory() as folder:
        Run(Path(folder), lambda _line: None).go()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _warm_up()
    _serve(socket.socket(fileno=int(sys.argv[1])))
