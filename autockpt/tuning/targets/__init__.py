"""What steps run on, or are simulated on: a device at hand, one that is described, a compiler."""
