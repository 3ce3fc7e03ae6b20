"""Measures of what a checkpoint knows."""
