"""What other devices do differently from the CPU that traces: their kernels, workspaces, autocast and allocator."""
