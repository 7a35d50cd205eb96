"""Where the bytes of a checkpoint rest, and how they get there without ever being half there."""
