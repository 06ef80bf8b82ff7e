"""What a device's kernels do otherwise than a CPU's: which run, what they save and take, the allocator."""
