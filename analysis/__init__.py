"""Numbers about runs: read trajectories, fit laws, forecast, judge divergence, draw. Never imports jax."""
