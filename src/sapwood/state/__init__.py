"""What a run's state is: named tensors, how they are laid out as bytes, and who saves which."""
