"""Hardware descriptions, as YAML files, and what reads them."""

from search_spaces.hardware.loader import list_hardware, load_hardware

__all__ = ["list_hardware", "load_hardware"]
