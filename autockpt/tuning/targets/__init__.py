"""What steps run on: a local device, simulated hardware, a compiler."""
