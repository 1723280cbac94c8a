"""Grafana dashboard and Prometheus alerts of a run, as tables, written where Ray keeps its own files."""
