"""kvpersist: a KV cache for vLLM that survives restarts."""

__version__ = "0.1.0"
