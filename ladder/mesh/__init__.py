"""The training step on several devices and processes: mesh, pipeline, sharded state."""
