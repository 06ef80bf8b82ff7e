"""Devices that training runs on: one module each; the table is in ``registry``."""

from autockpt.devices.base import MemoryReading, OffloadHandle, Peak, Transport
from autockpt.devices.registry import DEVICES, Device, get_device, make_current
from autockpt.devices.transport import OffloadTransports, Transports, host_bytes_of, host_notes, transport_for
