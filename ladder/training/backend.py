"""What a process that trains settles before jax starts: threads, compiled programs kept, memory kept, its companions.

Nothing here changes a result; only the thread count is part of a run's identity.
"""

import ctypes
import os
import sys
from pathlib import Path
from typing import Final

from rungwise.ladder.mesh.processes import join_processes

# glibc's mallopt parameters (malloc.h)
_TRIM_THRESHOLD: Final = -1
_MMAP_MAX: Final = -4
_ARENA_MAX: Final = -8
_NEVER: Final = 2**31 - 1


def prepare_backend(*, threads: int, cache: Path) -> None:
    """Call before the first use of jax.

    Args:
        threads: of the CPU backend; results depend on it in their last bits.
        cache: folder for compiled programs, so that a resumed run starts at once.
    """
    os.environ["NPROC"] = str(threads)
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache / "compiled"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
    keep_freed_memory()
    join_processes()


def keep_freed_memory() -> bool:
    """Lets the allocator keep what XLA frees after each step; whether it could be asked to (glibc only).

    By default every step's temporary buffers go back to the system and fault in again, page by page, at the next
    step: half the CPU time of a small model's step.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((_ARENA_MAX, 1), (_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER))
    accepted = [mallopt(name, value) == 1 for name, value in settings]
    return all(accepted)
