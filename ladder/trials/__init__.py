"""Trials of the platform itself, run by hand: kills, trouble with the store, a month of mishaps."""
