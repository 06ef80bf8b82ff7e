"""Logs as failed runs leave them; messages are worded as PyTorch words them, figures and paths are made up."""

SITE = "/opt/venv/lib/python3.11/site-packages"
MODELING = f"{SITE}/transformers/models/llama/modeling_llama.py"
MODULE = f"{SITE}/torch/nn/modules/module.py"

_INTO_MODEL = f'''Traceback (most recent call last):
  File "/home/me/train.py", line 88, in <module>
    main()
  File "/home/me/train.py", line 80, in main
    trainer.train()
  File "{SITE}/transformers/trainer.py", line 2240, in train
    return inner_training_loop(
           ^^^^^^^^^^^^^^^^^^^^
  File "{SITE}/transformers/trainer.py", line 3710, in training_step
    loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
  File "{SITE}/transformers/trainer.py", line 3801, in compute_loss
    outputs = model(**inputs)
'''
FORWARD = f'''{_INTO_MODEL}  File "{MODELING}", line 480, in forward
    outputs: BaseModelOutputWithPast = self.model(
  File "{MODELING}", line 417, in forward
    hidden_states = decoder_layer(
  File "{MODELING}", line 322, in forward
    hidden_states = self.mlp(hidden_states)
  File "{MODELING}", line 155, in forward
    down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
  File "{MODULE}", line 1773, in _wrapped_call_impl
    return self._call_impl(*args, **kwargs)
'''
BACKWARD = f'''Traceback (most recent call last):
  File "/home/me/loop.py", line 41, in <module>
    loss.backward()
  File "{SITE}/torch/_tensor.py", line 648, in backward
    torch.autograd.backward(
  File "{SITE}/torch/autograd/__init__.py", line 353, in backward
    _engine_run_backward(
  File "{SITE}/torch/autograd/graph.py", line 824, in _engine_run_backward
    return Variable._execution_engine.run_backward(  # Calls into the C++ engine to run the backward pass
'''
OPTIMIZER = f'''Traceback (most recent call last):
  File "/home/me/loop.py", line 44, in <module>
    optimizer.step()
  File "{SITE}/torch/optim/optimizer.py", line 493, in wrapper
    out = func(*args, **kwargs)
  File "{SITE}/torch/optim/adamw.py", line 232, in step
    has_complex = self._init_group(
  File "{SITE}/torch/optim/adamw.py", line 175, in _init_group
    state["exp_avg_sq"] = torch.zeros_like(
'''


def message(
    tried: str = "1.96 GiB",
    capacity: str = "23.52 GiB",
    free: str = "1.10 GiB",
    process: str = "22.41 GiB",
    allocated: str = "21.40 GiB",
    cached: str = "560.10 MiB",
    gpu: int = 0,
    backend: str = "CUDA",
) -> str:
    """The message of PyTorch 2.6 and later."""
    return (
        f"torch.OutOfMemoryError: {backend} out of memory. Tried to allocate {tried}. GPU {gpu} has a total capacity "
        f"of {capacity} of which {free} is free. Including non-PyTorch memory, this process has {process} memory in "
        f"use. Of the allocated memory {allocated} is allocated by PyTorch, and {cached} is reserved by PyTorch but "
        "unallocated. If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF="
        "expandable_segments:True to avoid fragmentation.  See documentation for Memory Management  "
        "(https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf)\n"
    )


def prefixed(text: str, prefix: str) -> str:
    """Every line with a launcher's prefix."""
    return "".join(f"{prefix}{line}\n" for line in text.splitlines())
