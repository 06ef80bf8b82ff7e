"""Side by side with every other way of saving memory: the same machine, batch and meter, interleaved steps."""
