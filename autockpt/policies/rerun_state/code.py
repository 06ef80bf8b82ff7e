"""What the code of a forward may do, by the names in it."""

from __future__ import annotations

import dis
import functools
import itertools
import re
import types
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_METHOD = re.compile(r":(?!closure\.)\w+\.(\w+)$")
_UNSEEN = frozenset({"data", "numpy", "untyped_storage", "storage", "data_ptr", "from_dlpack", "__array_interface__"})
_UNSEEN |= {"asarray", "asanyarray", "ascontiguousarray", "from_numpy", "_unsafe_preserve_version_counter"}
_UNSEEN |= {"__array__", "array", "asfortranarray", "require", "nditer", "atleast_1d", "atleast_2d", "atleast_3d"}
_UNSEEN |= {"all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "recv"}
_UNSEEN |= {"broadcast", "irecv"}
"""Names by which code comes to write to a tensor without its version counter showing it."""
OBSERVES = "fused_moving_avg_obs_fake_quant"
_STATISTICS = frozenset({"batch_norm", OBSERVES})
"""Names of what writes so to running statistics alone."""
_GRADIENTS = frozenset({"backward", "zero_grad", "clip_grad_norm_", "clip_grad_value_"})
"""Names by which code comes to add to gradients, or to change them."""
_BEGINS = frozenset({"acquire", "__enter__", "enter_context", "set_default_device", "set_flush_denormal"})
"""Names by which code comes to begin what it has to end itself. So it does by the method ``set`` of an event."""
_ASSIGNS, _BY_WORDS = frozenset({"STORE_GLOBAL", "STORE_ATTR"}), frozenset({"globals", "setattr", "vars", "__dict__"})
"""Instructions by which code makes names, and names by which it comes to make others."""


class Code(NamedTuple):
    """Whether code names what writes to tensors behind autograd's back, whether to any that it comes by and not to
    running statistics alone, whether it assigns to a ``.data``, whether it may call ``backward`` or go by a ``.grad``,
    whether it may have the CPU take denormal numbers for zero, which
    nobody can ask it, whether it does something of its own where an error passes by, and whether it may begin what it
    has to end itself, as to hold a lock."""

    writes_unseen: bool = False
    writes_to_any: bool = False
    assigns: bool = False
    uses_gradients: bool = False
    flushes_denormals: bool = False
    handles_errors: bool = False
    must_end: bool = False


def may_do(functions: Sequence[tuple[str, types.CodeType]]) -> Code:
    """Of functions by how they are reached. Of methods those alone count that code of these names."""
    named, found, left, before = {"forward"}, set[types.CodeType](), functions, -1
    while len(left) != before:
        before, later = len(left), []
        for name, code in left:
            method = _METHOD.search(name)
            if method is None or method[1] in named or method[1].startswith("__"):
                found.update(_parts(code))
                named.update(*(part.co_names for part in _parts(code)))
            else:
                later.append((name, code))
        left = later
    steps = (step for part in found if "data" in part.co_names for step in dis.get_instructions(part))
    assigns = any(step.opname == "STORE_ATTR" and step.argval == "data" for step in steps)
    gradients = not named.isdisjoint(_GRADIENTS) or any(map(_goes_by_grad, found))
    to_any = not named.isdisjoint(_UNSEEN)
    flushes = "set_flush_denormal" in named
    handles = any(part.co_exceptiontable for part in found)
    must_end = not named.isdisjoint(_BEGINS) or any(map(_calls_set, found))
    untold = to_any or not named.isdisjoint(_STATISTICS)
    return Code(untold, to_any, assigns, gradients, flushes, handles, must_end)


@functools.lru_cache(maxsize=10_000)
def names_of(code: types.CodeType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names by which code may come to globals, and such of them as it may make: all that it assigns to."""
    parts = list(_parts(code))
    names = {name for part in parts for name in part.co_names}
    made = [step.argval for part in parts for step in dis.get_instructions(part) if step.opname in _ASSIGNS]
    if not _BY_WORDS.isdisjoint(names):
        made += [word for part in parts for word in part.co_consts if type(word) is str and word.isidentifier()]
    return tuple(sorted(names.union(made))), tuple(dict.fromkeys(made))


def _goes_by_grad(code: types.CodeType) -> bool:
    """Whether code names a ``.grad``; that of ``torch.autograd`` is a function."""
    if "grad" in code.co_consts:  # for getattr
        return True
    steps = list(dis.get_instructions(code)) if "grad" in code.co_names else []
    attributes = (pair for pair in itertools.pairwise(steps) if pair[1].opname.endswith(("_ATTR", "_METHOD")))
    return any(step.argval == "grad" and before.argval != "autograd" for before, step in attributes)


def _calls_set(code: types.CodeType) -> bool:
    """Whether code names a ``.set``; ``set`` by itself is a class."""
    steps = dis.get_instructions(code) if "set" in code.co_names else ()
    return any(step.argval == "set" and step.opname.endswith(("_ATTR", "_METHOD")) for step in steps)


def _parts(code: types.CodeType) -> Iterator[types.CodeType]:
    """Code, and that of functions defined in it."""
    yield code
    for inner in code.co_consts:
        if type(inner) is types.CodeType:
            yield from _parts(inner)
