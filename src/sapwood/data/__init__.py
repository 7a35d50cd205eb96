"""Reading training samples as fast as the disk allows."""
