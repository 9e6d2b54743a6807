"""The runner and the command line: families, data, optimizer, training loop, tracking, checkpoints, watch."""
