"""What Grafana and Prometheus show of a run: panels and alerts as tables, written where Ray keeps its own."""
