"""What a device does that is not at hand, or not asked: the kernels that a step takes there, the memory that they take
from its allocator, and their seconds by its description."""
