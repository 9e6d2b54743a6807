"""Studies apart from a ladder's own runs: sweeps, drops, this machine's speed."""
