"""Makes stdin the controlling terminal, so that Ctrl-C there is a signal, then becomes the given program."""

import fcntl
import os
import sys
import termios

fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
