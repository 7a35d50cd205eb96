"""Forking a running training without stopping it."""
