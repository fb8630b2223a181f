"""The program in several processes: one run folder, one log, one table of all devices."""

import sys
from pathlib import Path

import pytest
from support.programs import python, read_json

from lightning_dp.app.run import quiet_in_other_processes


@pytest.mark.parametrize(("variable", "rank"), [("RANK", 0), ("RANK", 1), ("SLURM_PROCID", 3)])
def test_other_processes_than_the_first_write_no_folder_and_no_log(
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


@pytest.mark.slow
def test_a_training_of_two_processes_leaves_one_folder_and_one_log(tmp_path: Path) -> None:
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    options = ("trainer.devices=2", "trainer.max_epochs=2", "trainer.deterministic=true")
    job = ("-m", "lightning_dp", *options)
    done = python(*start, *job, cwd=tmp_path, OMP_NUM_THREADS="1")
    printed = done.stdout + done.stderr
    assert "Traceback" not in printed, printed
    assert printed.count("run folder:") == 1
    assert [file.name for file in tmp_path.iterdir()] == ["logs"]
    [folder] = (tmp_path / "logs" / "train" / "runs").iterdir()
    left = read_json(folder / "metrics.json")
    assert left["devices"] == ["process0/cpu", "process1/cpu"]
    assert sum(left["samples_per_device"]) == 2 * 1440 and left["test/acc"] > 0.5
    assert {file.name for file in folder.iterdir()} >= {"train.log", "config.yaml", ".hydra"}
    rows = (folder / "metrics.csv").read_text().splitlines()
    assert len(rows) == len(set(rows)), "each row is written once"
