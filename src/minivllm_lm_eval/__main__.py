"""The harness's own command line, with `minivllm` among its models: it reads no entry points for those."""

from lm_eval.__main__ import cli_evaluate

import minivllm_lm_eval  # noqa: F401  # registers the model

if __name__ == "__main__":
    cli_evaluate()
