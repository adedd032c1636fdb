"""Which of several processes has ended: each holds a line to the first one, and the system closes the line of a process
that dies, however it does.

Communication libraries tell late, or name whoever they were waiting for. Here the first process learns at once who it
was, says so in one sentence, and ends the others; if it is the first that dies, the second says so.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import Any, NoReturn

LEFT, FAILED, STOP = "left", "failed", "stop"
GRACE = 1.0
"""Seconds in which the first process may find the same error itself."""
TOLD = 2.0
"""Seconds between being told to end and doing so: a launcher that has seen a process die ends the others, too."""
GO_ON = "if some of the work was finished, the same command with --resume goes on"


def leads() -> bool:
    """Whether this is the process that speaks, also before it has met the others."""
    return os.environ.get("RANK", "0") == "0"


class Watch:
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._lines: dict[int, Connection[Any, Any]] = {}
        self._names: dict[int, str] = {}
        self._over = False
        self._thread = threading.Thread(target=self._lead if rank == 0 else self._follow, daemon=True)
        self._before: Any = None
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, _told_to_end)

    def begin(self, first: Callable[[Any], Any]) -> None:
        """`first(value)` is what the first process says."""
        name = f"rank {self.rank} of {self.size} (process {os.getpid()} on {socket.gethostname()})"
        if self.rank == 0:
            key = secrets.token_bytes(32)
            with Listener(("", 0), backlog=self.size, authkey=key) as listener:
                first((listener.address[1], key, name))
                for _ in range(1, self.size):
                    line = listener.accept()
                    rank, self._names[rank] = line.recv()  # type: ignore[misc]
                    self._lines[rank] = line
        else:
            port, key, self._names[0] = first(None)
            self._lines[0] = Client((os.environ.get("MASTER_ADDR", "localhost"), port), authkey=key)
            self._lines[0].send((self.rank, name))
        for line in list(self._lines.values()):
            _notice_lost_machines(line)
        self._thread.start()

    def end(self, error: BaseException | None) -> None:
        """This process leaves the others, which end if it does so with an error."""
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
        if self.rank == 0:
            self._over = True
            self._tell(LEFT if error is None else STOP)
        elif error is None:
            self._over = True
            self._tell(LEFT)
        else:
            self._tell((FAILED, _sentence(error)))
            self._thread.join(10 * GRACE)  # the first process speaks, and then ends this one

    def _lead(self) -> None:
        while self._lines and not self._over:
            for line in wait(list(self._lines.values()), timeout=1.0):
                rank = next(rank for rank, other in self._lines.items() if other is line)
                message = _heard(line)
                if message == LEFT:
                    del self._lines[rank]
                elif message is None and not self._over:
                    self._stop_all(f"{self._names[rank]} died, so that the job has ended; {GO_ON}")
                elif message is not None:
                    time.sleep(GRACE)
                    if not self._over:
                        self._stop_all(f"{self._names[rank]}: {message[1]}")

    def _follow(self) -> None:
        message = _heard(self._lines[0])
        if message == LEFT or self._over:
            return
        if message is None and self.rank == 1:
            _say(f"{self._names[0]} died, so that the job has ended; {GO_ON}")
        os._exit(2)

    def _stop_all(self, sentence: str) -> NoReturn:
        _say(sentence)
        self._tell(STOP)
        os._exit(2)  # the main thread waits for an answer that will not come

    def _tell(self, message: Any) -> None:
        for line in list(self._lines.values()):
            with suppress(OSError):
                line.send(message)


def _heard(line: Any) -> Any:
    """The next message; None where the other end is gone."""
    try:
        return line.recv()
    except (EOFError, OSError):
        return None


def _say(sentence: str) -> None:
    print(f"moepress: {sentence}", file=sys.stderr, flush=True)


def _sentence(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return "was told to end"
    return str(error) if type(error).__name__ == "MoepressError" else f"{type(error).__name__}: {error}"


def _told_to_end(*_: Any) -> None:
    time.sleep(TOLD)
    raise SystemExit(128 + signal.SIGTERM)


def _notice_lost_machines(line: Connection[Any, Any]) -> None:
    """A machine that loses its power closes nothing: have the system ask now and then."""
    with socket.socket(fileno=os.dup(line.fileno())) as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
            if hasattr(socket, option):
                own.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
