"""Search spaces, as YAML files, and what reads them."""

from search_spaces.spaces.loader import load_space, shipped_spaces

__all__ = ["load_space", "shipped_spaces"]
