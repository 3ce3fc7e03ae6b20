"""Requests in, completions out."""

from qwen38_jax.engine.engine import Engine
from qwen38_jax.engine.memory import NotEnoughMemory
from qwen38_jax.engine.request import Completion, Request, TokenLogprob

__all__ = ["Completion", "Engine", "NotEnoughMemory", "Request", "TokenLogprob"]
