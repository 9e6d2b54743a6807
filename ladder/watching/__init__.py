"""Judging a run while it trains, and telling people."""
