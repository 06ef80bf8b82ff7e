"""What plans are evaluated on: a local device, described hardware, compiled steps. ``base`` has the interface."""
