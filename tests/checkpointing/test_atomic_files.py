"""Files are written whole or not at all: crashes, links, permissions, pipes."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_dp import ModulePrefixCheckpointIO
from lightning_dp.checkpointing.files import read, write_safetensors

STATE = {"weight": torch.arange(4.0).view(2, 2), "bias": torch.arange(2.0) + 7}


def save(path: Path, n: int = 0, **more: Any) -> None:
    """Writes STATE in the format of the name."""
    if path.suffix == ".safetensors":
        pytest.importorskip("safetensors")
        write_safetensors(STATE, path)
    else:
        ModulePrefixCheckpointIO().save_checkpoint({"state_dict": STATE, "n": n, **more}, path)


class Breaks:
    """Fails while it is pickled, after tensors were written."""

    def __reduce__(self) -> Any:
        raise KeyboardInterrupt


class Stopped(FileIO):
    """A file whose writing is interrupted, as by Ctrl-C."""

    def write(self, data: Any) -> int:
        if self.tell() > 0:
            raise KeyboardInterrupt
        return super().write(data)


@pytest.mark.parametrize("failure", ["in pickle", "disk full", "Ctrl-C"])
def test_a_save_that_fails_leaves_the_old_file_and_no_other(
    failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "last.ckpt"
    save(path, 1)
    if failure == "in pickle":
        with pytest.raises(KeyboardInterrupt):
            save(path, 2, x=Breaks())
    elif failure == "Ctrl-C":
        with monkeypatch.context() as patched:
            patched.setattr(Path, "open", lambda path, mode: Stopped(path, mode))
            with pytest.raises(KeyboardInterrupt):
                save(path, 2)
    else:
        resource = pytest.importorskip("resource")
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
        try:
            with pytest.raises(OSError, match=r"File too large: .*last\.ckpt"):
                save(path, 2, big=torch.zeros(2**20))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, old)
    assert torch.load(path, weights_only=True)["n"] == 1
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_an_error_names_the_file_and_not_the_temporary_one(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError) as caught:
        save(tmp_path / "folder")
    assert caught.value.filename == str(tmp_path / "folder")
    assert caught.value.filename2 is None
    assert os.listdir(tmp_path) == ["folder"]


def test_threads_save_at_the_same_time(tmp_path: Path) -> None:
    io = ModulePrefixCheckpointIO()

    def save(n: int) -> None:
        for _ in range(10):
            io.save_checkpoint({"state_dict": {"w": torch.full((2**12,), n)}}, tmp_path / "x.ckpt")

    threads = [threading.Thread(target=save, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if (tmp_path / "x.ckpt").exists():
            weights = io.load_checkpoint(tmp_path / "x.ckpt")["state_dict"]["w"]
            assert weights.unique().numel() == 1
    assert os.listdir(tmp_path) == ["x.ckpt"]


@pytest.mark.skipif(os.name == "nt", reason="links and permissions of POSIX")
@pytest.mark.parametrize("suffix", [".ckpt", ".safetensors"])
def test_a_link_stays_and_its_target_is_written(suffix: str, tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    target, link, second = (tmp_path / name for name in ("far/t", "link" + suffix, "two" + suffix))
    target.write_bytes(b"old")
    target.chmod(0o640)
    link.symlink_to(Path("far") / "t")  # relative, as people make them
    second.symlink_to(link)
    save(second)
    assert second.is_symlink() and link.is_symlink() and not target.is_symlink()
    loaded = read(second)
    assert torch.equal(loaded.get("state_dict", loaded)["weight"], STATE["weight"])
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert sorted(p.name for p in (tmp_path / "far").iterdir()) == ["t"]
    to_nothing = tmp_path / f"nothing{suffix}"
    to_nothing.symlink_to(tmp_path / "new" / "file")
    save(to_nothing)
    assert to_nothing.is_symlink() and (tmp_path / "new" / "file").is_file()
    save(tmp_path / "new.ckpt")
    (tmp_path / "plain").open("wb").close()
    new, plain = (stat.S_IMODE((tmp_path / n).stat().st_mode) for n in ("new.ckpt", "plain"))
    assert new == plain  # as the umask says


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes of POSIX")
@pytest.mark.parametrize("suffix", [".ckpt", ".safetensors"])
def test_a_pipe_is_written_to_and_stays_a_pipe(suffix: str, tmp_path: Path) -> None:
    path, link = tmp_path / f"pipe{suffix}", tmp_path / f"link{suffix}"
    os.mkfifo(path)
    link.symlink_to(path)
    for name in (path, link):
        got: list[bytes] = []
        reader = threading.Thread(target=lambda got=got: got.append(path.read_bytes()))
        reader.start()
        save(name)
        reader.join(timeout=60)
        (tmp_path / f"copy{suffix}").write_bytes(got[0])
        assert read(tmp_path / f"copy{suffix}")
        assert stat.S_ISFIFO(path.stat().st_mode) and link.is_symlink()


# Forked, so that the package is imported once: a child saves one checkpoint after another until it
# is killed; the parent then loads what is there.
KILLS = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from lightning.pytorch.plugins import AsyncCheckpointIO
from lightning_dp import ModulePrefixCheckpointIO

folder, kind = Path(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
random.seed(0)
path = folder / "last.ckpt"
temporary = lambda: [name for name in os.listdir(folder) if name.endswith(".tmp")]

def save_forever(first, report):
    io = ModulePrefixCheckpointIO()
    io = io if kind == "sync" else AsyncCheckpointIO(io)
    for step in range(first, 10**9):
        weights = {f"module.{i}": torch.full((2**18,), float(step)) for i in range(8)}
        io.save_checkpoint({"state_dict": weights, "step": step}, path)
        io.teardown()  # an asynchronous one has ended then
        os.write(report, f"{step}\\n".encode())

step, in_the_middle = 0, 0
while in_the_middle < 8:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        save_forever(step + 1, writing)
    os.close(writing)
    reported = os.read(reading, 64)  # at least one is complete
    time.sleep(random.uniform(0, 0.05))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while part := os.read(reading, 2**16):
        reported += part
    os.close(reading)
    last = int(reported.split()[-1])
    in_the_middle += bool(temporary())  # of a file that was being written
    loaded = ModulePrefixCheckpointIO().load_checkpoint(path)
    step = loaded["step"]
    # The killed save may be complete though the child could not say so any more.
    assert step in (last, last + 1), (step, last)
    assert list(loaded["state_dict"]) == [str(i) for i in range(8)]
    assert all((w == step).all() for w in loaded["state_dict"].values())
    for name in temporary():
        os.unlink(folder / name)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked processes")
@pytest.mark.parametrize("kind", ["sync", "asynchronous"])
def test_the_last_complete_checkpoint_survives_kills(kind: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLS, str(tmp_path), kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
