"""An accelerator that really runs late, on the CPU: tests of streams and lifetimes where there is no GPU.

``device.cpp`` is the device, ``module`` what PyTorch wants to know of it from Python, ``build`` compiles it once for
each user. A process has the device when the folder that ``build`` returns is on its ``PYTHONPATH``: an entry point of
the group ``torch.backends`` lies there, by which PyTorch itself loads backends, so a search's worker, too, has it
without knowing. The first that asks compiles it, others wait for the lock: 20 s of processor time (82 s on two cores at
a load average of 16), none from the cache. Tests never load it into their own process: it would be the accelerator of
all other tests.
"""
