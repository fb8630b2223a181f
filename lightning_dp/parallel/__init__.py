"""The engine: splitting, replicas, threads and gathering. It knows torch and nothing else."""
