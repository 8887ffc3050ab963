"""`minivllm` where no file may become larger than so many bytes: limited_minivllm.py BYTES ARGS..."""

import resource
import sys

from minivllm_cli.main import main

_limit = int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_FSIZE, (_limit, _limit))
main()
