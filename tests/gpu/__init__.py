"""First contact with a GPU: every question about CUDA, asked of a real card by one script. See README.md."""
