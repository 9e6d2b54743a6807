"""Starting runs and seeing how far they are: here, or through Slurm."""
