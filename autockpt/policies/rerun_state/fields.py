"""Attributes and slots of an object, past all that its class may have to say of them; no code of somebody's runs."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

from autockpt.policies.rerun_state.kinds import ABSENT, Names
from autockpt.policies.rerun_state.libraries import is_library

HEAP = 1 << 9
"""The flag of classes that are made at run time: those written in Python, and some of C's."""
_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType)
_LONG = 10_000


def attributes(obj: Any) -> dict[str, Any] | None:
    """The dictionary of an object's attributes, past all that its class may have to say."""
    for owner in type(obj).__mro__:
        found: Any = vars(owner).get("__dict__")
        if type(found) in _DESCRIPTORS:
            return found.__get__(obj)
    return None


def own_fields(value: Any) -> dict[str, Any] | None:
    """The attributes of an object of somebody's own class that another with the same can stand for; None for others."""
    cls = type(value)
    if cls is not types.SimpleNamespace:
        owners = cls.__mro__[:-1]
        if not owners or not all(map(_in_python, owners)) or any(map(is_library, owners)):
            return None
        if issubclass(cls, (type, nn.Module)) or cls.__new__ is not object.__new__ or hasattr(cls, "__del__"):
            return None
        try:
            object.__new__(cls)
        except TypeError:  # made in C at run time
            return None
    fields = attributes(value)
    if fields is not None and type(fields) is not dict:  # a dictionary of somebody's own class: no other is like it
        return None
    found = {name: part for name in slots_of(cls) if (part := _slot(value, name)) is not ABSENT} | (fields or {})
    return None if any(type(p) in (list, dict, tuple) and len(p) > _LONG for p in found.values()) else found


@functools.lru_cache(maxsize=10_000)
def _in_python(cls: type) -> bool:
    """Whether a class is written in Python. Those that C makes at run time look alike; in one that ``object.__new__``
    makes nothing would be set."""
    in_c = (types.WrapperDescriptorType, types.MethodDescriptorType)
    return bool(cls.__flags__ & HEAP) and not any(type(value) in in_c for value in vars(cls).values())


def slots_of(cls: type) -> Iterator[str]:
    for owner in cls.__mro__:
        if owner.__flags__ & HEAP:
            yield from (k for k, v in vars(owner).items() if type(v) is types.MemberDescriptorType)


def _member(obj: Any, name: str) -> Any:
    """The descriptor of a slot, past a property of that name; None where there is no such slot."""
    found = (vars(owner).get(name) for owner in type(obj).__mro__)
    return next((member for member in found if type(member) in _DESCRIPTORS), None)


def _slot(obj: Any, name: str) -> Any:
    try:
        return _member(obj, name).__get__(obj)
    except (AttributeError, ValueError):  # of an empty cell
        return ABSENT


def set_field(obj: Any, name: str, value: Any) -> None:
    """Set one of ``own_fields``, and run no property of that name."""
    member = _member(obj, name)
    if member is not None:
        member.__set__(obj, value)
    elif (fields := attributes(obj)) is not None:
        fields[name] = value


def slots_named(*names: str) -> Names:
    return Names(names, _slot, set_field, lambda obj, name: _member(obj, name).__delete__(obj))
