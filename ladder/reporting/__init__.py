"""The HTML page about a family."""
