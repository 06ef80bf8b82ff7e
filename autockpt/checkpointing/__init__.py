"""Checkpointing of one module's calls: what happens between a forward and its backward. Knows no plan and no choice.

Read ``frame`` first: one call of a unit. ``arguments`` holds what the call was given (of a ``kv_cache`` a copy),
``replay_context`` what it ran under, ``module_state`` what its modules hold and change, ``unit`` what all calls of a
unit have in common, and ``divergence`` compares what is recomputed. ``kept_outputs`` and ``segment`` are frames that
keep more or less. ``recorded_call`` does without running Python again: by ``recipes``, planned from what
``op_recorder`` noted.
"""
