"""``sapwood demo``: a training (`training`) and the scenes shown from it (`scenes`)."""
