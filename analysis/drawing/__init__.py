"""Figures, and how they look."""
