"""What every test may rely on."""

from __future__ import annotations

import signal

# Started in the background (nohup, a job of a shell without job control) a process ignores SIGINT, and so do its
# children: tests that press Ctrl-C would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
