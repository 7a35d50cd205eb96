"""What is shown of runs and models: pages that a browser opens."""
