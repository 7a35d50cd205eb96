"""Mechanisms of one process in a group: who it is, whom it meets, its threads and its folder."""
