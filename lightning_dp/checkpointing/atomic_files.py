"""Files that are complete or not there at all, whatever happens while they are written."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from lightning_dp.parallel.generated import context


def _host() -> str:
    """Where process ids mean the same processes: a machine, or a container on it."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux
        namespace = ""
    return re.sub(r"\W", "_", socket.gethostname() + namespace)


_HOST = _host()
_TEMPORARY = re.compile(rf"\.lightning-dp-{re.escape(_HOST)}-(\d+)-[0-9a-f]+\.tmp")
_writing: set[str] = set()  # the names of this process's temporary files


def local_path(path: str | os.PathLike[str]) -> Path | None:
    """The path of a local file; None for an address such as `s3://bucket/file`."""
    name = _without_scheme(os.fspath(path), on_windows=os.name == "nt")
    return None if "://" in name else Path(name)


def _without_scheme(name: str, *, on_windows: bool) -> str:
    """A path without `file://`; on Windows also without the slash before the letter of a drive."""
    bare = name.removeprefix("file://")
    is_after_slash = bare != name and re.match(r"/[A-Za-z]:(/|\\|$)", bare)
    return bare[1:] if on_windows and is_after_slash else bare


@context
def replacing(path: Path) -> Iterator[Path]:
    """Gives a temporary path to write to, and puts what was written there in place of a file.

    It lies in the same folder, so that one step of the file system replaces the old file by the
    new one; before that, all is on the disk. After an error the old file is as it was, and also
    after a crash, which leaves the temporary file: the next writer into the folder removes it.
    A device or pipe, such as `/dev/null`, is no file to be replaced: it is written to itself.
    Through a symbolic link its target is replaced, and the new file has the old one's permissions.
    A file that may not be written is not replaced either. An OSError names the file, not the
    temporary one.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        yield path
        return
    target = _target(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_left_behind(target.parent)
    name = f".lightning-dp-{_HOST}-{os.getpid()}-{secrets.token_hex(4)}.tmp"
    temporary = target.parent / name
    _writing.add(name)
    try:
        yield temporary
        with temporary.open("r+b") as file:
            os.fsync(file.fileno())
        if target.exists():
            temporary.chmod(stat.S_IMODE(target.stat().st_mode))
        os.replace(temporary, target)
        _folder_to_disk(target.parent)
    except OSError as error:
        if error.errno is None or error.filename not in (None, str(temporary), str(target)):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with contextlib.suppress(OSError):  # it is gone by now, or was never there
            temporary.unlink()
        _writing.discard(name)


def _target(path: Path) -> Path:
    """The file behind symbolic links; an OSError if links go round in a circle, or it is locked."""
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    if target.is_file() and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    return target


def _folder_to_disk(folder: Path) -> None:
    """Makes the new name last; Windows cannot open folders, nor can some network file systems."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_left_behind(folder: Path) -> None:
    """Removes the temporary files of processes of this machine that are no more."""
    for name in os.listdir(folder):
        found = _TEMPORARY.fullmatch(name)
        if found and name not in _writing and not _is_running(int(found[1])):
            with contextlib.suppress(OSError):  # another process was quicker, or it is open
                (folder / name).unlink()


def _is_running(pid: int) -> bool:
    """Whether another process runs; one that we cannot tell about on Windows does not."""
    if os.name == "nt" or pid == os.getpid():
        return False  # on Windows a file that is being written cannot be removed
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
