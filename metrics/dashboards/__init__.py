"""Grafana dashboards, built with Grafana's own SDK; `*.json` here is what `build.py` writes and Grafana is given."""
