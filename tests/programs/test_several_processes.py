"""The program in several processes: one run folder, one log, one table of all devices."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import run_in_processes
from torch.distributed import TCPStore

from lightning_dp.app.together import STARTED, agree_on_run_folder, of_all

OPTIONS = ("trainer.devices=2", "trainer.max_epochs=2", "trainer.deterministic=true")


def named(*arguments: str) -> tuple[str, list[str]]:
    sys.argv = ["program", *arguments]
    agree_on_run_folder()
    return os.environ[STARTED], sys.argv[1:]


def test_all_processes_name_the_folder_alike_and_the_first_one_alone_logs() -> None:
    (first, own), (second, others) = run_in_processes(named, 2, "trainer.devices=2")
    assert first == second
    assert own == ["trainer.devices=2"]
    silent = ["hydra/job_logging=none", "hydra/hydra_logging=none", "hydra.output_subdir=null"]
    assert others == [*own, *silent]


def test_jobs_of_slurm_are_named_by_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_NTASKS": "2", "SLURM_JOB_ID": "71", "SLURM_PROCID": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(STARTED, "")
    monkeypatch.setattr(sys, "argv", ["program"])
    agree_on_run_folder()
    assert os.environ[STARTED] == "slurm_71_0"


def test_one_process_names_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STARTED, raising=False)
    monkeypatch.setattr(sys, "argv", ["program", "a=1"])
    agree_on_run_folder()
    assert STARTED not in os.environ and sys.argv == ["program", "a=1"]
    assert of_all("mine") == ["mine"]


def run(folder: Path, *arguments: str, machines: int = 1) -> str:
    """What the program prints under torchrun, with an agent for each machine."""
    # Of the agents none may keep the store: the others would miss it when that one is through.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    start = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={machines}"]
    start += [f"--nproc-per-node={2 // machines}", "--rdzv-backend=c10d", "--rdzv-id=test"]
    start += [f"--rdzv-endpoint=127.0.0.1:{store.port}", "--rdzv-conf=is_host=0"]
    start += ["-m", "lightning_dp", *OPTIONS, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    agents = [
        subprocess.Popen(
            start,
            cwd=folder,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for _ in range(machines)
    ]
    printed = [agent.communicate(timeout=300)[0] for agent in agents]
    assert all(agent.returncode == 0 for agent in agents), "\n".join(printed)
    return "\n".join(printed)


@pytest.mark.slow
@pytest.mark.parametrize("machines", [1, 2])
def test_a_training_of_two_processes_leaves_one_folder(tmp_path: Path, machines: int) -> None:
    printed = run(tmp_path, f"trainer.num_nodes={machines}", machines=machines)
    assert printed.count("run folder:") == 1 and "Traceback" not in printed
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
