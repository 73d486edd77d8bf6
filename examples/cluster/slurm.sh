#!/usr/bin/env bash
# Trains on all GPUs of 2 hosts, with one process for each host:
#   sbatch examples/cluster/slurm.sh
# JAX reads the hosts and the number of processes from Slurm's variables.
#SBATCH --job-name=jaxmotion
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.log
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"

# If one process fails, all end: the others would wait in a collective.
srun --kill-on-bad-exit=1 "${PYTHON:-.venv/bin/python}" -m examples.cluster.train
