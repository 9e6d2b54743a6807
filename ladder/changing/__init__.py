"""What happens to a run on the way: phases, declared changes, another horizon, branches."""
