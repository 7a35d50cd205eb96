"""Writing databases: from other kinds of files, and from databases that have grown holes."""
