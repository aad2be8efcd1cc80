"""Runs on every node: reads local counters and serves them to Prometheus; imports nothing heavy."""
