"""Devices that training runs on: one module each, behind the protocols in ``base``; the table is in ``registry``."""

from autockpt.devices.base import Device, OffloadHandle, Peak, Transport
from autockpt.devices.registry import DEVICES, get_device, make_current
from autockpt.devices.transport import OffloadTransports, Transports, host_bytes_of, said_of_host, transport_for
