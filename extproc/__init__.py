"""Token-aware admission control for LLM inference, as an Envoy external-processing service."""

__version__ = "0.1.0"
