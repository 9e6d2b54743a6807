"""What a run leaves behind: journal, checkpoints, its mirror in MLflow, exported weights."""
