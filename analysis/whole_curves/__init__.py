"""Curves over a run's progress: shapes, bands, laws of schedules."""
