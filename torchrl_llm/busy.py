"""Threads that a collection's end could not wait for: what they are called, and the warning that names them.

Run by the thread that ends the collection.
"""

from __future__ import annotations

import threading
import warnings


def thread_name(ident: int) -> str:
    """The name of a thread, by its identifier."""
    return next((t.name for t in threading.enumerate() if t.ident == ident), f"thread {ident}")


def warn_busy(threads: list[str]) -> None:
    """Warns that threads are still in a call that nothing can interrupt."""
    warnings.warn(
        f"the collector ended while {', '.join(threads)} could not be interrupted: an environment's step or a policy's "
        "call has not returned. The thread is a daemon and ends with that call or with the process",
        RuntimeWarning,
        stacklevel=3,
    )
