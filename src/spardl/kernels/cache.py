"""Where compiled loops are kept, who compiles them, and what is said to the person who waits.

numba keeps compiled code in NUMBA_CACHE_DIR if that is set, else beside the source, else in the user's cache folder.
Where none of these can be written, as in a read-only install without a home, it is kept here in a temporary folder, and
where there is none either, in this process's memory.

What lies there is code that will run, so folders of ours belong to this user, and nobody else may write to them. The
lock by which one process compiles for all is waited for for a while only: whoever holds it for longer hangs, and a
process that was killed has let go of it.
"""

import atexit
import contextlib
import fcntl
import functools
import importlib
import logging
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)

COMPILING = "spardl: compiling its loops for this machine, which takes 10 to 25 s;"
KEPT = f"{COMPILING} later starts read them from disk."
REMEDY = "set NUMBA_CACHE_DIR to a folder that lasts."
KEPT_FOR_A_WHILE = (
    f"{COMPILING} neither spardl's own folder nor the home can be written, so they are kept in %s: {REMEDY}"
)
IN_MEMORY = f"{COMPILING} no folder for them can be written, so they are compiled anew in every process: {REMEDY}"
NOT_WAITED_FOR = "spardl: another process has been compiling its loops for %g s; going on without it."
LONGEST_WAIT_S = 300.0  # for another process that compiles
NAP_S = 0.05
MANY = 12  # loops; fewer are compiled in a second or two, without a word
NO_PLACE = "no locator available"  # numba's words


def import_compiled(name: str) -> ModuleType:
    """Import a module of loops that numba compiles.

    The first process on a machine compiles (10 to 25 s), and says so; those that start with it wait for it when they
    come to compile something, so that N workers compile once and not N times. Later ones read what it has kept, all at
    once.
    """
    started = time.monotonic()
    try:
        with _on_compiling(lambda: _say(KEPT)):
            module = importlib.import_module(name)
    except RuntimeError as error:
        if NO_PLACE not in str(error):
            raise
        folder = _temporary_folder()
        place = _in_memory() if folder is None else _keeping_in(folder)
        words = (IN_MEMORY,) if folder is None else (KEPT_FOR_A_WHILE, folder)
        with _on_compiling(lambda: _say(*words)), place:
            module = importlib.import_module(name)
    logger.info("loaded %s in %.1f s", name, time.monotonic() - started)
    return module


@dataclass(frozen=True)
class Kept:
    """Where a module's loops are kept, whether this process had to compile any, and whether the place lasts."""

    folder: Path
    compiled: bool
    for_a_while: bool


def kept_in(name: str) -> Kept:
    """What became of the loops of a module that has been imported."""
    loops = [each for each in vars(sys.modules[name]).values() if hasattr(each, "stats") and each.signatures]
    folder = Path(loops[0].stats.cache_path)
    compiled = any(loop.stats.cache_misses for loop in loops)
    own = [each for each in folder.parents if each.parent == Path(tempfile.gettempdir())]  # at most one
    return Kept(folder, compiled, any(each.name.startswith("spardl-") for each in own))


@functools.cache
def _say(text: str, *details: object) -> None:
    """Once in a process. A warning, because that is what is shown where nobody has set up logging."""
    logger.warning(text, *details)


@contextlib.contextmanager
def _on_compiling(say: Callable[[], None]) -> Iterator[None]:
    """Inside, only one process compiles: the lock is held from the first loop on that is not found on disk. What
    another one has compiled by then is found there. `say` is called when it turns out that many must be compiled.
    """
    from numba.core import event

    class Compiling(event.Listener):
        count = 0

        def on_start(self, event: Any) -> None:
            self.count += 1
            if self.count == 1:
                lock.enter_context(_one_at_a_time())
            if self.count == MANY:
                say()

        def on_end(self, event: Any) -> None:
            pass

    with contextlib.ExitStack() as lock, event.install_listener("numba:compile", Compiling()):
        yield


@contextlib.contextmanager
def _keeping_in(folder: Path) -> Iterator[None]:
    """Inside, numba keeps what is decorated in this folder; what others compile later is not concerned."""
    import numba

    config: Any = numba.config
    before, config.CACHE_DIR = config.CACHE_DIR, str(folder)
    try:
        yield
    finally:
        config.CACHE_DIR = before


@contextlib.contextmanager
def _in_memory() -> Iterator[None]:
    """Inside, what is decorated is compiled and kept nowhere."""
    from numba.core.dispatcher import Dispatcher

    loops: Any = Dispatcher
    before, loops.enable_caching = loops.enable_caching, lambda self: None
    try:
        yield
    finally:
        loops.enable_caching = before


@functools.cache
def _temporary_folder() -> Path | None:
    """This user's own, which the next process finds again; else this process's own, which goes with it; else none."""
    with contextlib.suppress(OSError):
        return _users_folder()
    try:
        folder = Path(tempfile.mkdtemp(prefix="spardl-"))
    except OSError:
        return None
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _users_folder() -> Path:
    """A folder in the temporary one that nobody else can read or write: what lies there is code."""
    folder = Path(tempfile.gettempdir()) / f"spardl-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(f"{folder} is somebody else's")
    return folder


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Hold a lock file beside the compiled code, or in the temporary folder where the package is read-only.

    Not for ever: concurrent writers of the cache write the same thing, so the lock saves time and nothing else.
    """
    for find in (_own_folder, _users_folder):
        try:
            handle = os.open(find() / "compile.lock", os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
        except OSError:
            continue
        try:
            if not _locked(handle):
                logger.warning(NOT_WAITED_FOR, LONGEST_WAIT_S)
            yield
        finally:
            os.close(handle)
        return
    yield


def _locked(handle: int) -> bool:
    """Whether the lock is ours now; waits for it for a while."""
    deadline = time.monotonic() + LONGEST_WAIT_S
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            if time.monotonic() > deadline:
                return False
            time.sleep(NAP_S)


def _own_folder() -> Path:
    """Where compiled code is kept: who keeps it elsewhere has nothing to wait for here."""
    folder = Path(os.environ.get("NUMBA_CACHE_DIR") or Path(__file__).parent / "__pycache__")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder
