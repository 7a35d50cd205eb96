"""Moving bytes between processes that meet for one transfer only."""
