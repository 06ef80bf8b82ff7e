"""What ops take on a device, at hand or only described: the kernels that a step takes there, the memory that these take
from its allocator, and their seconds by its description."""
