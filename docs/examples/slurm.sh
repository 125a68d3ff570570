#!/bin/bash
# Train on four hosts of eight GPUs: sbatch docs/examples/slurm.sh
#SBATCH --job-name=clip
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append

# One process a host. USR1 reaches them 120 s before the time limit: they save a checkpoint and exit with 75.
# A task that is killed gives 137 or 143. The same command then continues from the newest checkpoint.
srun --kill-on-bad-exit=0 python -m experiments.train \
    --config=configs/base.py --workdir="$HOME/runs/clip" --config.dataset='shards/{00000..00331}.tar' \
    --config.model=ViT-B/32 --config.batch_size=32768 --config.epochs=30 \
    --config.optimizer.learning_rate=1e-3 --config.optimizer.warmup_steps=1000
status=$?
case $status in
    75 | 137 | 143)
        if [ "${SLURM_RESTART_COUNT:-0}" -lt 50 ]; then
            scontrol requeue "$SLURM_JOB_ID"
        fi
        ;;
esac
exit $status
