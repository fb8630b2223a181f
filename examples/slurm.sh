#!/bin/bash
# Trains on two machines with four GPUs each: one process a machine, all its GPUs inside.
#   sbatch examples/slurm.sh experiment=digits
#SBATCH --job-name=lightning_dp
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --time=01:00:00
#SBATCH --signal=SIGUSR1@90

set -euo pipefail

# Lightning reads ranks and addresses from SLURM's variables; srun starts a process per task.
srun python -m lightning_dp \
    trainer.num_nodes="$SLURM_JOB_NUM_NODES" trainer.accelerator=gpu trainer.devices=4 "$@"
