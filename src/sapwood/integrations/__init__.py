"""Sapwood behind the interfaces of other libraries."""
