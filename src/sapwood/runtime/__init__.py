"""Where a process finds out who it is, and the small mechanisms every system stands on."""
