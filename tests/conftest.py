"""What all tests share."""

from __future__ import annotations

import signal

# A shell that runs the tests in the background makes them ignore Ctrl-C, and with it the tests that send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
