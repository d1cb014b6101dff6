"""Metrics, traces and logs of the service. Everything here listens; nothing decides."""
