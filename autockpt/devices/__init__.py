"""Devices that training runs on: one module each, behind the protocols in ``base``; the table is in ``registry``."""

from autockpt.devices.base import Device, Parcel, Peak, Transport
from autockpt.devices.registry import DEVICES, get_device, process_environment
from autockpt.devices.transport import transport_for

__all__ = ["DEVICES", "Device", "Parcel", "Peak", "Transport", "get_device", "process_environment", "transport_for"]
