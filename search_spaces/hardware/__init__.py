"""Hardware descriptions, as YAML files, and what reads them."""

from search_spaces.hardware.loader import described_like, list_hardware, load_hardware

__all__ = ["described_like", "list_hardware", "load_hardware"]
