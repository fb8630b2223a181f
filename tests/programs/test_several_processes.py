"""The program in several processes: one run folder, one log, one table of all devices."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from lightning_dp.app.run import quiet_in_other_processes

OPTIONS = ("trainer.devices=2", "trainer.max_epochs=2", "trainer.deterministic=true")


@pytest.mark.parametrize(("variable", "rank"), [("RANK", 0), ("RANK", 1), ("SLURM_PROCID", 3)])
def test_the_first_process_alone_has_a_folder_and_a_log(
    variable: str, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, str(rank))
    monkeypatch.setattr(sys, "argv", ["program", "a=1", "hydra.run.dir=mine"])
    quiet_in_other_processes(lambda: None)()
    own, added = sys.argv[:3], sys.argv[3:]
    assert own == ["program", "a=1", "hydra.run.dir=mine"]
    assert (
        ("hydra/job_logging=none" in added) == ("hydra.output_subdir=null" in added) == (rank > 0)
    )
    assert "hydra.run.dir=." not in added


def run(folder: Path, *arguments: str, machines: int = 1) -> str:
    """What the program prints under torchrun, with an agent for each machine."""
    # Of the agents none may keep the store: the others would miss it when that one is through.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    start = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={machines}"]
    start += [f"--nproc-per-node={2 // machines}", "--rdzv-backend=c10d", "--rdzv-id=test"]
    start += [f"--rdzv-endpoint=127.0.0.1:{store.port}", "--rdzv-conf=is_host=0"]
    start += ["-m", "lightning_dp", *OPTIONS, *arguments]
    output: dict[str, int] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    agents = [
        subprocess.Popen(start, cwd=folder, env=env, text=True, **output) for _ in range(machines)
    ]
    printed = [agent.communicate(timeout=300)[0] for agent in agents]
    assert all(agent.returncode == 0 for agent in agents), "\n".join(printed)
    return "\n".join(printed)


@pytest.mark.slow
@pytest.mark.parametrize("machines", [1, 2])
def test_a_training_of_two_processes_leaves_one_folder(tmp_path: Path, machines: int) -> None:
    printed = run(tmp_path, f"trainer.num_nodes={machines}", machines=machines)
    assert printed.count("run folder:") == 1 and "Traceback" not in printed
    assert [file.name for file in tmp_path.iterdir()] == ["logs"]
    [folder] = (tmp_path / "logs" / "train" / "runs").iterdir()
    left = json.loads((folder / "metrics.json").read_text())
    assert left["devices"] == [
        f"process{rank}/cpu{number}"
        for rank in range(2)
        for number in ([""] if machines == 1 else [":0", ":1"])
    ]
    assert sum(left["samples_per_device"]) == 2 * 1440 and left["test/acc"] > 0.5
    assert {file.name for file in folder.iterdir()} >= {"train.log", "config.yaml", ".hydra"}
    rows = (folder / "metrics.csv").read_text().splitlines()
    assert len(rows) == len(set(rows)), "each row is written once"
