"""The evidence: right answers, held-out errors, coverage and speed, by `python -m rungwise.analysis.benchmarks`."""
