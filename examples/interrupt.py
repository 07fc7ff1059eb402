"""Ctrl-C ends the program at once, with one line and exit code 130."""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable

SHOW_CURSOR = b"\x1b[?25h"
_last_words: list[Callable[[], str]] = [lambda: " before it began"]


def say_on_ctrl_c(last_words: Callable[[], str]) -> None:
    """Sets what Ctrl-C prints after "interrupted"; a thread calls `last_words`."""
    _last_words.append(last_words)


def end_on_ctrl_c() -> None:
    """Makes Ctrl-C end the program as if it were killed, with a line on stderr.

    Python raises `KeyboardInterrupt` in the main thread as soon as it runs Python code
    again: after a compilation; in a callback of jax, which swallows the exception; or
    in a save, whose threads then fail or never end. A separate thread ends the program
    in all of these cases.
    """
    if signal.getsignal(signal.SIGINT) != signal.default_int_handler:
        return  # The caller chose to ignore SIGINT.
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.set_wakeup_fd(sender.fileno())

    def end() -> None:
        with sender, receiver:
            receiver.recv(1)
            if sys.stdout.isatty():  # A bar hides the cursor and keeps printing.
                screen = os.dup(1)
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                os.write(screen, SHOW_CURSOR + b"\n")
            # A bar replaces `sys.stderr`, so this prints to the original.
            print(f"interrupted{_last_words[-1]()}", file=sys.__stderr__, flush=True)
            os._exit(130)

    threading.Thread(target=end, daemon=True).start()
