"""The detectors, each one rule or a few of one kind, and what they share."""
