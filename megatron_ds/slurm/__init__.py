"""Runs as jobs of Slurm, which queues them again until they are complete."""
